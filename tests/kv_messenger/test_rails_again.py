"""When a decode node that has fenced rails of a prefill node greets it again, with all of them."""

import msgspec
import numpy as np

from fabric.simulated import SimulatedEngine, SimulatedNetwork
from kv_messenger.attempts import Fetch
from kv_messenger.peers import RAILS_AGAIN_S, Introduction
from kv_messenger.receiver import Receiver
from kv_messenger.sessions import AVOID_S
from kv_messenger.targets import Target
from protocol.messages import (
    Failure,
    FailureCode,
    Hello,
    PrefillRefused,
    RailFenced,
    RailLost,
    Welcome,
    WritesInDoubt,
)
from protocol.ticket import TransferKey
from tests.kv_messenger.builders import layout
from tests.kv_messenger.pairing import PEER, Owner

OF = layout(layers=2, page_size=4)
RAILS = 3


class Decode:
    """With a landing that the prefill node has welcomed, and nothing under way."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.said: list[msgspec.Struct] = []
        fabric = SimulatedEngine(SimulatedNetwork(), rails=RAILS)
        self._pool = np.zeros(OF.block_bytes(0), np.uint8)
        self.receiver = Receiver(
            me=Introduction("decode-instance", "decode-0", "digest", OF),
            fabric=fabric,
            targets=[Target(Owner(), [fabric.register(self._pool.ctypes.data, self._pool.nbytes)])],
            send=lambda _, message: self.said.append(message),
            hang_up=lambda _: None,
            clock=lambda: self.now,
        )
        key = TransferKey("request", 1, "decode-instance")
        self.receiver.fetch(Fetch(key, "", PEER, [7], [[0]], 0, 60.0))
        self.receiver.on_welcome(Welcome(instance=PEER.instance, landing=1, layout=OF))
        failure = Failure(FailureCode.OVERLOADED, "full")
        self.receiver.on_refused(PrefillRefused(instance=PEER.instance, key=key, failure=failure))
        assert self.receiver.transfers == 0

    def said_of(self, kind: type[msgspec.Struct]) -> int:
        return sum(isinstance(message, kind) for message in self.said)

    def lose(self, rail: int) -> None:
        doubts = [WritesInDoubt(immediate=0, completed=0)]
        lost = RailLost(instance=PEER.instance, landing=1, rail=rail, remotes=[rail], doubts=doubts)
        self.receiver.on_rail_lost(lost)

    def wait(self, seconds: float) -> None:
        """Hearing of the prefill node."""
        self.now += seconds
        self.receiver.on_seen(PEER.instance)
        self.receiver.on_tick(self.now)


def test_it_waits_until_the_last_lost_rail_may_be_tried_again() -> None:
    """A session that is opened while the prefill node avoids a rail would do without it for good."""
    decode = Decode()
    decode.lose(1)
    decode.wait(RAILS_AGAIN_S / 2)
    decode.lose(2)
    decode.wait(RAILS_AGAIN_S - 1)
    assert (decode.said_of(Hello), decode.said_of(RailFenced)) == (1, 2)
    decode.wait(2)
    assert decode.said_of(Hello) == 2
    assert RAILS_AGAIN_S >= AVOID_S


def test_a_prefill_node_that_asks_again_does_not_put_it_off() -> None:
    decode = Decode()
    decode.lose(1)
    decode.wait(RAILS_AGAIN_S - 1)
    decode.lose(1)
    decode.wait(2)
    assert (decode.said_of(Hello), decode.said_of(RailFenced)) == (2, 2)


def test_a_landing_with_all_its_rails_stays() -> None:
    decode = Decode()
    decode.wait(2 * RAILS_AGAIN_S)
    assert decode.said_of(Hello) == 1
