"""A decode node's connections to prefill nodes, over real sockets: one for each address, whoever lives there."""

import queue
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from decode_node.server import PrefillLinks
from kv_messenger.pump import Pump
from kv_messenger.receiver import Receiver
from protocol.channel import ControlThread, Link
from protocol.curve import ClusterKey, new_cluster_key
from protocol.messages import (
    Failure,
    FailureCode,
    FromDecode,
    HelloRefused,
    Message,
    Ping,
    Pong,
    PrefillAddress,
    Welcome,
)
from tests.kv_messenger.builders import layout

DEADLINE_S = 10.0
ME = "decode-0"
REFUSAL = Failure(FailureCode.STALE_PEER, "another instance")


class Prefill:
    """A prefill node's socket."""

    def __init__(self, key: ClusterKey, instance: str, address: str = "tcp://127.0.0.1:*") -> None:
        self.instance = instance
        self.asked: queue.Queue[Any] = queue.Queue()
        self.control = ControlThread(key, instance, lambda: None)
        self.link, self.address = self.control.bind(address, FromDecode, self._receive)
        self.control.start()

    def _receive(self, link: Link, sender: bytes, message: Any) -> None:
        self.asked.put(message)

    def say(self, message: Message) -> None:
        self.control.send(self.link, message, ME.encode())

    def close(self) -> None:
        if self.control.alive:
            self.control.close()


class Decode:
    """What its messenger hears."""

    def __init__(self, key: ClusterKey) -> None:
        self.heard: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.control = ControlThread(key, ME, lambda: None)
        self.links = PrefillLinks(self.control)
        self.links.deliver_to(cast(Pump, self), cast(Receiver, self))
        self.control.start()

    def submit(self, action: Callable[[], None]) -> None:
        action()

    def on_seen(self, instance: str) -> None:
        self.heard.put(("seen", instance))

    def on_welcome(self, welcome: Welcome) -> None:
        self.heard.put(("welcome", welcome.instance))

    def on_hello_refused(self, asked: str, refused: HelloRefused) -> None:
        self.heard.put(("refused", asked))

    def peer_dead(self, instance: str) -> None:
        self.heard.put(("dead", instance))

    def next(self) -> tuple[str, Any]:
        return self.heard.get(timeout=DEADLINE_S)

    def ping(self, prefill: Prefill, instance: str) -> None:
        """Whoever is at its address hears it."""
        self.links.send(PrefillAddress(instance, "prefill", prefill.address), Ping(instance=ME))
        assert prefill.asked.get(timeout=DEADLINE_S) == Ping(instance=ME)


@pytest.fixture
def key() -> ClusterKey:
    return new_cluster_key()


@pytest.fixture
def decode(key: ClusterKey) -> Iterator[Decode]:
    node = Decode(key)
    yield node
    node.control.close()


@pytest.fixture
def first(key: ClusterKey, decode: Decode) -> Iterator[Prefill]:
    """It has answered."""
    node = Prefill(key, "prefill.0")
    decode.ping(node, "prefill.0")
    node.say(Pong(instance="prefill.0"))
    assert decode.next() == ("seen", "prefill.0")
    yield node
    node.close()


def test_two_instances_at_one_address_do_not_take_each_others_place(
    key: ClusterKey, decode: Decode, first: Prefill
) -> None:
    """A node that was started again is asked for its work while the dead one is still asked for its name."""
    first.close()
    second = Prefill(key, "prefill.1", first.address)
    decode.ping(second, "prefill.1")
    decode.ping(second, "prefill.0")
    second.say(Welcome(instance="prefill.1", landing=2, layout=layout()))
    heard = set(iter(decode.next, ("welcome", "prefill.1")))
    assert heard == {("dead", "prefill.0")}
    decode.ping(second, "prefill.1")
    second.close()


def test_one_that_ends_is_dead_before_anybody_misses_it(decode: Decode, first: Prefill) -> None:
    """No clock ticks here."""
    first.close()
    assert decode.next() == ("dead", "prefill.0")


def test_one_that_was_gone_before_it_was_asked_is_dead_at_once(decode: Decode, first: Prefill) -> None:
    first.close()
    assert decode.next() == ("dead", "prefill.0")
    decode.links.send(PrefillAddress("prefill.0", "prefill", first.address), Ping(instance=ME))
    assert decode.next() == ("dead", "prefill.0")


def test_a_late_word_of_the_instance_before_proves_nothing_of_the_next(decode: Decode, first: Prefill) -> None:
    decode.ping(first, "prefill.1")
    first.say(Pong(instance="prefill.0"))
    first.say(Pong(instance="prefill.0"))
    assert [decode.next(), decode.next()] == [("seen", "prefill.0")] * 2


def test_a_greeting_that_reaches_another_instance_is_refused_by_that_one(decode: Decode, first: Prefill) -> None:
    """By its number the receiver knows whose it was."""
    decode.ping(first, "prefill.stale")
    first.say(HelloRefused(instance="prefill.0", landing=7, failure=REFUSAL))
    assert {decode.next(), decode.next()} == {("refused", "prefill.0"), ("refused", "prefill.stale")}


def test_a_connection_lasts_until_nobody_at_its_address_is_known_any_more(decode: Decode, first: Prefill) -> None:
    decode.ping(first, "prefill.1")
    for instance in ("prefill.0", "prefill.1"):
        decode.links.hang_up(instance)
        decode.ping(first, "prefill.1")
    assert decode.links.count == 1
