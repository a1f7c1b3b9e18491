"""The receiving side over a simulated network, driven step by step: what it says, and when pages are safe."""

import time
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from fabric.api import Landing, PageWrites
from fabric.errors import FabricUnavailable
from fabric.immediates import SLOTS
from fabric.simulated import SimulatedEngine, SimulatedNetwork
from kv_messenger.attempts import Arrival, Fetch
from kv_messenger.peers import PEER_TIMEOUT_S, Introduction
from kv_messenger.receiver import Receiver
from kv_messenger.receiver_transfer import SETTLE_DEADLINE_S, STOP_DEADLINE_S
from kv_messenger.targets import Target
from protocol.layout import KVLayout
from protocol.messages import (
    AbortTransfer,
    Failure,
    FailureCode,
    Hello,
    HelloRefused,
    Ping,
    PrefillAddress,
    PrefillRefused,
    PrefillRequest,
    PrefillTimes,
    Stopped,
    TransferFinished,
    Welcome,
)
from protocol.ticket import TransferKey
from tests.kv_messenger.builders import layout

OF = layout(layers=2, page_size=4)
BLOCKS = 16
PEER = PrefillAddress("prefill-instance", "prefill-0", "tcp://127.0.0.1:1")
TIMES = PrefillTimes(chunks=1, queue_s=0.0, prefill_s=0.0, early_writes=0, last_chunk_writes=0)


class OnlyWhenDead(SimulatedEngine):
    """As `tcp;ofi_rxm`: a landing may be closed only once its peer is dead."""

    def fence_needs_dead_peer(self, landing: Landing) -> bool:
        return True


@dataclass
class Owner:
    arrivals: list[Arrival] = field(default_factory=list)
    failures: dict[TransferKey, Failure] = field(default_factory=dict)
    safe: list[TransferKey] = field(default_factory=list)
    timed: list[TransferKey] = field(default_factory=list)

    def kv_arrived(self, arrival: Arrival) -> None:
        self.arrivals.append(arrival)

    def kv_failed(self, key: TransferKey, failure: Failure) -> None:
        assert key not in self.failures
        self.failures[key] = failure

    def pages_safe(self, key: TransferKey) -> None:
        assert key not in self.safe
        self.safe.append(key)

    def prefill_timed(self, key: TransferKey, times: PrefillTimes) -> None:
        self.timed.append(key)


class World:
    """A receiver under test, and the fabric of a sender that the test plays."""

    def __init__(self, kind: type[SimulatedEngine] = SimulatedEngine) -> None:
        network = SimulatedNetwork()
        self.fabric, self.sender = kind(network), SimulatedEngine(network)
        self.pool = np.zeros(BLOCKS * OF.block_bytes(0), dtype=np.uint8)
        self.source = np.ones(BLOCKS * OF.block_bytes(0), dtype=np.uint8)
        self.source_region = self.sender.register(self.source.ctypes.data, self.source.nbytes)
        self.owner = Owner()
        self.sent: list[msgspec.Struct] = []
        self.hung_up: list[str] = []
        self.region = self.fabric.register(self.pool.ctypes.data, self.pool.nbytes)
        self.receiver = Receiver(
            me=Introduction("decode-instance", "decode-0", "digest", OF),
            fabric=self.fabric,
            targets=[Target(self.owner, [self.region])],
            send=lambda _, message: self.sent.append(message),
            hang_up=self.hung_up.append,
        )

    def last(self, kind: type[msgspec.Struct]) -> msgspec.Struct:
        return [message for message in self.sent if isinstance(message, kind)][-1]

    def fetch(self, name: str = "r", blocks: tuple[int, ...] = (3, 5), deadline_s: float = 60.0) -> TransferKey:
        key = TransferKey(name, 1, "decode-instance")
        tokens = [7] * (len(blocks) * OF.page_size)
        self.receiver.fetch(Fetch(key, "", PEER, tokens, [blocks], 0, deadline_s))
        return key

    def welcome(self, layout: KVLayout = OF) -> None:
        hello = self.last(Hello)
        assert isinstance(hello, Hello)
        self.receiver.on_welcome(Welcome(instance=PEER.instance, landing=hello.landing, layout=layout))

    def post(self, pages: int | None = None) -> None:
        """Write the first `pages` pages of layer 0 (None: all of both layers) of the last PrefillRequest."""
        request = self.last(PrefillRequest)
        hello = self.last(Hello)
        assert isinstance(request, PrefillRequest) and isinstance(hello, Hello)
        endpoint = self.sender.connect("decode-0", hello.landing_address)
        for layer in range(2 if pages is None else 1):
            blocks = request.ticket.blocks[0][:pages]
            self.sender.write(
                endpoint,
                PageWrites(
                    source=self.source_region,
                    source_indices=blocks,
                    source_stride=OF.block_bytes(0),
                    source_offset=0,
                    target=self.region.remote,
                    target_indices=blocks,
                    target_stride=OF.block_bytes(0),
                    target_offset=layer * OF.page_bytes,
                    length=OF.page_bytes,
                    immediate=request.ticket.immediate,
                ),
            )

    def run(self, turns: int = 40) -> None:
        for _ in range(turns):
            self.sender.progress(0)
            self.receiver.on_events(self.fabric.progress(0))


def later(seconds: float) -> float:
    """A clock reading for `on_tick`, so far ahead."""
    return time.monotonic() + seconds


def test_the_request_is_sent_only_after_the_peer_welcomed_us() -> None:
    world = World()
    world.fetch()
    assert [type(message) for message in world.sent] == [Hello]
    world.welcome()
    assert [type(message) for message in world.sent] == [Hello, PrefillRequest]


def test_all_writes_make_one_arrival_and_safe_pages() -> None:
    world = World()
    key = world.fetch()
    world.welcome()
    world.post()
    world.run()
    assert [(a.key, a.writes, a.bytes) for a in world.owner.arrivals] == [(key, 4, 4 * OF.page_bytes)]
    assert world.owner.safe == [key] and not world.owner.failures
    assert world.receiver.transfers == 0 and world.receiver.slots_free == SLOTS
    assert world.pool[3 * OF.block_bytes(0)] == 1 and world.pool[4 * OF.block_bytes(0)] == 0


def test_an_abort_is_safe_once_the_stopped_writes_were_counted() -> None:
    world = World()
    key = world.fetch()
    world.welcome()
    world.post(pages=1)
    world.receiver.abort(key, None)
    assert isinstance(world.sent[-1], AbortTransfer) and world.owner.safe == []
    world.receiver.on_stopped(Stopped(instance=PEER.instance, key=key, posted=1, completed=0, failure=None))
    assert world.owner.safe == []
    world.run()
    assert world.owner.safe == [key] and not world.owner.failures and not world.owner.arrivals


def test_a_sender_that_lied_about_its_posts_is_fenced_and_greeted_anew() -> None:
    world = World()
    key = world.fetch()
    world.welcome()
    world.receiver.on_stopped(Stopped(instance=PEER.instance, key=key, posted=3, completed=3, failure=None))
    world.run()
    assert world.owner.safe == []
    world.receiver.on_tick(later(SETTLE_DEADLINE_S))
    assert world.owner.safe == [key] and world.receiver.counters.fences == 1
    hellos = [message for message in world.sent if isinstance(message, Hello)]
    assert [hello.landing for hello in hellos] == [1, 2] and hellos[0].landing_address != hellos[1].landing_address


def test_a_write_in_flight_at_the_fence_never_lands() -> None:
    world = World()
    key = world.fetch()
    world.welcome()
    world.post()
    world.receiver.abort(key, None)
    world.receiver.on_tick(later(STOP_DEADLINE_S))
    assert world.owner.safe == [key]
    world.run()
    assert not world.pool.any()


def test_a_fence_takes_down_every_transfer_of_that_peer() -> None:
    world = World()
    first, second = world.fetch("a", (1,)), world.fetch("b", (2,))
    world.welcome()
    world.receiver.abort(first, None)
    world.receiver.on_tick(later(STOP_DEADLINE_S))
    assert world.owner.failures[second].code is FailureCode.TRANSFER_FAILED
    assert set(world.owner.safe) == {first, second}


def test_a_silent_peer_is_lost_fenced_and_hung_up() -> None:
    world = World()
    key = world.fetch()
    world.welcome()
    world.receiver.on_tick(later(PEER_TIMEOUT_S + 0.1))
    assert world.owner.failures[key].code is FailureCode.NODE_LOST and world.owner.safe == [key]
    assert world.hung_up == [PEER.instance] and world.receiver.peers == 0


def test_where_only_dead_peers_may_be_fenced_a_silent_ones_pages_wait_for_the_proof() -> None:
    world = World(OnlyWhenDead)
    key = world.fetch()
    world.welcome()
    world.receiver.on_tick(later(PEER_TIMEOUT_S + 0.1))
    assert key in world.owner.failures and world.owner.safe == []
    world.receiver.on_tick(later(10_000.0))
    assert world.owner.safe == [] and world.receiver.lingering_landings == 1
    world.receiver.peer_dead(PEER.instance)
    assert world.owner.safe == [key] and world.receiver.lingering_landings == 0


def test_a_lost_peer_is_asked_for_its_name_while_its_landing_lingers() -> None:
    """Only an answer of another instance at its address may ever prove it dead: it may have been started again."""
    world = World(OnlyWhenDead)
    world.fetch()
    world.welcome()
    world.receiver.on_tick(later(PEER_TIMEOUT_S + 0.1))
    assert world.receiver.peers == 0 and world.receiver.lingering_landings == 1
    world.sent.clear()
    world.receiver.on_tick(later(2 * PEER_TIMEOUT_S))
    assert world.sent == [Ping(instance="decode-instance")]
    world.receiver.peer_dead(PEER.instance)
    world.sent.clear()
    world.receiver.on_tick(later(3 * PEER_TIMEOUT_S))
    assert world.sent == []


def test_a_lost_peer_that_comes_back_and_accounts_for_its_writes_ends_the_wait() -> None:
    world = World(OnlyWhenDead)
    key = world.fetch()
    world.welcome()
    world.post(pages=1)
    world.receiver.on_tick(later(PEER_TIMEOUT_S + 0.1))
    world.receiver.on_stopped(Stopped(instance=PEER.instance, key=key, posted=1, completed=1, failure=None))
    world.run()
    assert world.owner.safe == [key]
    world.receiver.on_tick(later(0.0))
    assert world.receiver.lingering_landings == 0 and world.fabric.gauges().endpoints == 0


def test_a_refused_greeting_fails_what_waited_for_it() -> None:
    world = World()
    key = world.fetch()
    failure = Failure(FailureCode.INCOMPATIBLE, "page sizes differ")
    world.receiver.on_hello_refused(PEER.instance, HelloRefused(instance=PEER.instance, landing=1, failure=failure))
    assert world.owner.failures == {key: failure} and world.owner.safe == [key]
    assert world.fabric.gauges().endpoints == 0


def test_a_stale_session_is_renewed_and_the_request_may_be_tried_again() -> None:
    world = World()
    key = world.fetch()
    world.welcome()
    failure = Failure(FailureCode.STALE_PEER, "no session")
    world.receiver.on_refused(PrefillRefused(instance=PEER.instance, key=key, failure=failure))
    assert world.owner.failures == {key: failure} and world.owner.safe == [key]
    hello = world.last(Hello)
    assert isinstance(hello, Hello) and hello.landing == 2


@pytest.mark.parametrize("attempt", [1, 2])
def test_completions_of_unknown_or_ended_transfers_are_counted_and_dropped(attempt: int) -> None:
    """P14."""
    world = World()
    key = world.fetch()
    world.welcome()
    world.post()
    world.run()
    unknown = TransferKey("r", attempt, "decode-instance")
    for _ in range(2):
        world.receiver.on_stopped(Stopped(instance=PEER.instance, key=unknown, posted=4, completed=4, failure=None))
        world.receiver.on_refused(
            PrefillRefused(instance=PEER.instance, key=unknown, failure=Failure(FailureCode.INVALID, "?"))
        )
        world.receiver.on_finished(
            TransferFinished(instance=PEER.instance, key=unknown, posted=4, times=TIMES, checksums=None)
        )
    assert world.receiver.counters.unknown_completions == 4
    assert world.owner.safe == [key] and not world.owner.failures and len(world.owner.arrivals) == 1


def test_without_a_free_slot_a_fetch_is_refused_and_its_pages_are_safe() -> None:
    world = World()
    for index in range(SLOTS):
        world.fetch(str(index), (index % BLOCKS,))
    key = world.fetch("one too many")
    assert world.owner.failures[key].code is FailureCode.OVERLOADED and world.owner.safe == [key]


def test_stopping_fails_what_is_open_and_is_idle_once_the_senders_have_answered() -> None:
    world = World()
    key = world.fetch()
    world.welcome()
    world.receiver.stop_all(Failure(FailureCode.DRAINING, "going"))
    assert world.owner.failures[key].code is FailureCode.DRAINING and world.owner.safe == []
    assert isinstance(world.sent[-1], AbortTransfer) and not world.receiver.wait_idle(0)
    world.receiver.on_stopped(Stopped(instance=PEER.instance, key=key, posted=0, completed=0, failure=None))
    world.run()
    assert world.owner.safe == [key] and world.receiver.wait_idle(0)


@pytest.mark.parametrize("kind", [SimulatedEngine, OnlyWhenDead])
@pytest.mark.parametrize("cause", ["abort", "deadline", "silence"])
def test_a_request_given_up_before_the_welcome_is_never_sent(kind: type[SimulatedEngine], cause: str) -> None:
    """Else its AbortTransfer overtakes it, and the peer writes into pages that were declared safe."""
    world = World(kind)
    key = world.fetch(deadline_s=1.0)
    match cause:
        case "abort":
            world.receiver.abort(key, None)
        case "deadline":
            world.receiver.on_tick(later(1.0))
        case "silence":
            world.receiver.on_tick(later(PEER_TIMEOUT_S + 0.1))
    assert world.owner.safe == [key]
    world.welcome()
    kinds = {type(message) for message in world.sent}
    assert PrefillRequest not in kinds and AbortTransfer not in kinds


def test_an_abort_that_the_peer_never_heard_of_fences_nobody() -> None:
    """Its request was lost on the way: the answer closes this account, and the other transfers go on."""
    world = World()
    lost, other = world.fetch("lost", (1,)), world.fetch("other", (2,))
    world.welcome()
    world.receiver.abort(lost, None)
    world.receiver.on_stopped(Stopped(instance=PEER.instance, key=lost, posted=0, completed=0, failure=None))
    world.run()
    assert world.owner.safe == [lost] and world.receiver.counters.fences == 0 and other not in world.owner.failures


def test_only_the_instance_that_was_asked_may_answer() -> None:
    """A restarted node on the same address knows nothing of its predecessor's writes."""
    world = World()
    key = world.fetch()
    world.welcome()
    world.receiver.abort(key, None)
    world.receiver.on_stopped(Stopped(instance="its successor", key=key, posted=0, completed=0, failure=None))
    assert world.owner.safe == [] and world.receiver.counters.unknown_completions == 1


def test_without_a_landing_endpoint_only_the_request_fails() -> None:
    class Exhausted(SimulatedEngine):
        def open_landing(self, peer: str) -> Landing:
            raise FabricUnavailable("too many open files")

    world = World(Exhausted)
    key = world.fetch()
    assert world.owner.failures[key].code is FailureCode.TRANSFER_FAILED and world.owner.safe == [key]
    assert world.receiver.slots_free == SLOTS and world.receiver.transfers == 0


def test_two_landings_of_one_instance_may_linger() -> None:
    world = World(OnlyWhenDead)
    first = world.fetch("a", (1,))
    world.welcome()
    world.receiver.on_tick(later(PEER_TIMEOUT_S + 0.1))
    second = world.fetch("b", (2,))
    world.welcome()
    world.receiver.on_tick(later(PEER_TIMEOUT_S + 0.1))
    assert world.receiver.lingering_landings == 2
    world.receiver.peer_dead(PEER.instance)
    assert set(world.owner.safe) == {first, second}
    assert world.fabric.gauges().endpoints == 0


def test_a_welcome_from_pools_that_do_not_fit_fails_what_waited_for_it() -> None:
    """The sender judges first, by the same rule; but nothing is asked of one that did not."""
    world = World()
    key = world.fetch()
    world.welcome(msgspec.structs.replace(OF, head_dim=4))
    assert world.owner.failures[key].code is FailureCode.INCOMPATIBLE and world.owner.safe == [key]
    assert PrefillRequest not in {type(message) for message in world.sent}
    assert world.fabric.gauges().endpoints == 0 and world.receiver.slots_free == SLOTS
