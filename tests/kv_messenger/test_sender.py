"""The sending side over a simulated network, driven step by step, with a scripted engine."""

import ctypes
import time
from collections.abc import Collection

import msgspec
import numpy as np
import pytest

from fabric.api import PageWrites, Sending
from fabric.errors import FabricUnavailable, FabricUsageError
from fabric.simulated import Faults, SimulatedEngine, SimulatedNetwork
from kv_messenger.peers import PEER_TIMEOUT_S
from kv_messenger.regions import as_ticketed
from kv_messenger.sender import Sender
from kv_messenger.sender_transfer import Chunk
from kv_messenger.sent import engine_id
from kv_messenger.sources import Source
from protocol.gates import Gates
from protocol.messages import (
    AbortTransfer,
    Failure,
    FailureCode,
    Hello,
    HelloRefused,
    Ping,
    Pong,
    PrefillAccepted,
    PrefillRefused,
    PrefillRequest,
    Stopped,
    TransferFinished,
    Welcome,
)
from protocol.ticket import TransferKey, TransferTicket
from tests.kv_messenger.builders import ScriptedEngine, layout

OF = layout(layers=2, page_size=4)
BLOCKS = 16
DECODE = "decode-instance"
TARGETS = [9, 2]


class World:
    def __init__(self, faults: Faults | None = None, kind: type[SimulatedEngine] = SimulatedEngine) -> None:
        network = SimulatedNetwork(0, faults)
        self.fabric, self.receiver = kind(network), SimulatedEngine(network)
        self.pool = np.arange(BLOCKS * OF.block_bytes(0), dtype=np.uint64).astype(np.uint8)
        self.target = np.zeros(BLOCKS * OF.block_bytes(0), dtype=np.uint8)
        self.target_region = self.receiver.register(self.target.ctypes.data, self.target.nbytes)
        self.word = ctypes.c_uint64(0)
        self.engine = ScriptedEngine()
        self.sent: list[msgspec.Struct] = []
        region = self.fabric.register(self.pool.ctypes.data, self.pool.nbytes)
        self.sender = Sender(
            instance="prefill-instance",
            compatibility="digest",
            layout=OF,
            fabric=self.fabric,
            sources=[Source(self.engine, ctypes.addressof(self.word), (region,))],
            send=lambda _, message: self.sent.append(message),
            gates=Gates(),
        )

    def hello(self, landing: int = 1, **changes: object) -> None:
        address = self.receiver.open_landing("prefill-0").address
        hello = Hello(
            instance=DECODE,
            name="decode-0",
            expects="prefill-instance",
            compatibility="digest",
            layout=OF,
            landing=landing,
            landing_address=address,
        )
        self.sender.on_hello(msgspec.structs.replace(hello, **changes))

    def request(
        self, name: str = "r", landing: int = 1, deadline_s: float = 60.0, checksums: bool = False
    ) -> TransferKey:
        key = TransferKey(name, 1, DECODE)
        remote = self.target_region.remote
        ticket = TransferTicket(
            key=key,
            landing=landing,
            first_page=0,
            immediate=1 << 20 | 1,
            blocks=[TARGETS],
            regions=[as_ticketed(remote)],
        )
        self.sender.on_prefill_request(
            PrefillRequest(ticket=ticket, public_id="", tokens=[1] * 8, deadline_s=deadline_s, checksums=checksums)
        )
        return key

    def announce(self, key: TransferKey) -> None:
        self.sender.on_chunks([(engine_id(key), Chunk(0, 8, [(4, 5)], self.word.value + 1))])

    def forward(self, key: TransferKey) -> None:
        self.announce(key)
        self.word.value += OF.layers
        self.sender.on_forward_ended([engine_id(key)], 1, 2)

    def run(self, turns: int = 40) -> None:
        for _ in range(turns):
            self.receiver.progress(0)
            self.sender.on_events(self.fabric.progress(0))

    def kinds(self) -> list[type]:
        return [type(message) for message in self.sent]


def test_a_prompt_is_computed_written_reported_and_released() -> None:
    world = World()
    world.hello()
    key = world.request()
    assert world.kinds() == [Welcome, PrefillAccepted] and world.engine.submitted == [engine_id(key)]
    world.forward(key)
    assert world.engine.released == []
    world.run()
    assert world.kinds()[-1] is TransferFinished and world.engine.released == [engine_id(key)]
    pool, target = (memory.reshape(BLOCKS, OF.block_bytes(0)) for memory in (world.pool, world.target))
    assert np.array_equal(target[TARGETS], pool[[4, 5]])
    assert not np.delete(target, TARGETS, axis=0).any()


@pytest.mark.parametrize("wanted", [False, True])
def test_checksums_come_with_the_last_word_where_the_decode_node_wants_them(wanted: bool) -> None:
    world = World()
    world.hello()
    key = world.request(checksums=wanted)
    world.forward(key)
    world.run()
    finished = world.sent[-1]
    assert isinstance(finished, TransferFinished)
    assert len(finished.checksums or b"") == wanted * 4 * OF.layers * len(TARGETS)


def test_checksums_of_pages_that_cannot_be_read_here_are_refused() -> None:
    world = World()
    world.sender.readable = False
    world.hello()
    world.request("plain")
    world.request("compared", checksums=True)
    refused = world.sent[-1]
    assert isinstance(refused, PrefillRefused) and "--debug-pages" in refused.failure.message
    assert len(world.engine.submitted) == 1


def test_no_write_leaves_before_its_layer_is_done() -> None:
    world = World()
    world.hello()
    world.announce(world.request())
    world.run()
    assert world.fabric.counters().writes_posted == 0
    world.word.value = 1
    world.run()
    assert world.fabric.counters().writes_posted == 2


def test_a_ticket_is_used_once_however_often_it_comes() -> None:
    world = World()
    world.hello()
    key = world.request()
    world.request()
    assert world.engine.submitted == [engine_id(key)] and world.sender.counters.accepted == 1
    world.forward(key)
    world.run()
    world.request()
    assert world.engine.submitted == [engine_id(key)] and world.kinds()[-2:] == [TransferFinished, TransferFinished]


def test_an_abort_stops_the_writes_and_keeps_the_pages_until_they_ended() -> None:
    world = World(Faults(max_delay=30, reorder=True))
    world.hello()
    key = world.request()
    world.announce(key)
    world.word.value = 1
    while world.fabric.counters().writes_posted < 2:
        world.sender.on_events(world.fabric.progress(0))
    world.sender.on_abort(AbortTransfer(key=key))
    stopped = world.sent[-1]
    assert isinstance(stopped, Stopped) and stopped.posted == 2 and world.engine.aborted == [engine_id(key)]
    assert world.engine.released == []
    world.word.value = 2
    world.run(200)
    assert world.engine.released == [engine_id(key)] and world.fabric.counters().writes_posted == 2


def test_an_abort_after_the_end_repeats_the_last_word() -> None:
    world = World()
    world.hello()
    key = world.request()
    world.forward(key)
    world.run()
    world.sender.on_abort(AbortTransfer(key=key))
    assert world.kinds()[-2:] == [TransferFinished, TransferFinished]


def test_an_abort_of_an_unknown_transfer_says_that_nothing_was_posted() -> None:
    world = World()
    world.sender.on_abort(AbortTransfer(key=TransferKey("?", 1, DECODE)))
    (stopped,) = world.sent
    assert isinstance(stopped, Stopped) and (stopped.posted, stopped.failure) == (0, None)
    assert world.sender.counters.unknown_aborts == 1


def test_a_request_that_comes_after_its_abort_is_stopped_already() -> None:
    """Its decode node was told that nothing would be written, and may have given the pages away."""
    world = World()
    world.hello()
    world.sender.on_abort(AbortTransfer(key=TransferKey("r", 1, DECODE)))
    world.request("r")
    assert world.engine.submitted == [] and world.sender.transfers == 0
    assert world.kinds() == [Welcome, Stopped, Stopped]


def test_a_prompt_that_the_engine_refuses_is_stopped_with_nothing_posted() -> None:
    world = World()
    world.hello()
    key = world.request()
    world.engine.refuse(Failure(FailureCode.TOO_LONG, "too long"))
    stopped = world.sent[-1]
    assert isinstance(stopped, Stopped) and stopped.posted == 0
    assert stopped.failure is not None and stopped.failure.code is FailureCode.TOO_LONG
    assert world.engine.released == [engine_id(key)] and world.sender.transfers == 0


def test_a_failed_forward_stops_its_writes_before_a_later_forward_could_set_them_off() -> None:
    world = World()
    world.hello()
    key = world.request()
    world.announce(key)
    world.sender.on_engine_failed(engine_id(key), Failure(FailureCode.INTERNAL, "boom"))
    world.word.value += 10
    world.run()
    assert world.fabric.counters().writes_posted == 0 and world.kinds()[-1] is Stopped


def test_a_request_without_a_current_session_is_refused() -> None:
    world = World()
    world.request("before hello")
    world.hello(landing=2)
    world.request("old landing", landing=1)
    refusals = [message for message in world.sent if isinstance(message, PrefillRefused)]
    assert [refusal.failure.code for refusal in refusals] == [FailureCode.STALE_PEER] * 2
    assert world.engine.submitted == []


def test_a_new_landing_ends_the_transfers_of_the_old_one() -> None:
    world = World()
    world.hello()
    key = world.request()
    world.announce(key)
    world.hello(landing=2)
    assert [kind for kind in world.kinds() if kind is Stopped] == [Stopped] and world.kinds()[-1] is Welcome
    world.word.value += OF.layers
    world.run()
    assert world.fabric.counters().writes_posted == 0 and world.engine.released == [engine_id(key)]


def test_a_late_greeting_does_not_replace_a_newer_session() -> None:
    world = World()
    world.hello(landing=2)
    world.hello(landing=1)
    world.request(landing=2)
    assert world.kinds()[-1] is PrefillAccepted


def test_strangers_are_refused_with_the_reason() -> None:
    world = World()
    world.hello(expects="somebody else")
    world.hello(compatibility="other", layout=layout(layers=3))
    world.hello(layout=msgspec.structs.replace(OF, tensor_parallel=3))
    world.hello(compatibility="other")
    refusals = [message for message in world.sent if isinstance(message, HelloRefused)]
    assert [refusal.failure.code.value for refusal in refusals] == ["stale_peer", *["incompatible"] * 3]
    reasons = [refusal.failure.message for refusal in refusals]
    assert "groups" in reasons[1] and "3 ranks" in reasons[2] and "protocol" in reasons[3]
    assert world.sender.sessions == 0


def test_without_a_sending_endpoint_the_greeting_is_refused() -> None:
    class Exhausted(SimulatedEngine):
        def connect(
            self, peer: str, landing_address: bytes, without: Collection[int] = (), asks_peer: bool = False
        ) -> Sending:
            raise FabricUnavailable("too many open files")

    world = World(kind=Exhausted)
    world.hello()
    (refused,) = world.sent
    assert isinstance(refused, HelloRefused) and refused.failure.code is FailureCode.OVERLOADED


def test_a_silent_decode_node_loses_its_session_and_its_prompts_stop() -> None:
    world = World()
    world.hello()
    key = world.request()
    world.announce(key)
    world.sender.on_tick(time.monotonic() + PEER_TIMEOUT_S + 0.1)
    world.run()
    assert world.sender.sessions == 0 and world.engine.released == [engine_id(key)]
    assert world.fabric.gauges().endpoints == 0


def test_a_ping_is_answered_also_without_a_session() -> None:
    world = World()
    world.sender.on_ping(Ping(instance=DECODE))
    assert world.sent == [Pong(instance="prefill-instance")]


def test_the_deadline_stops_a_prompt_that_still_waits() -> None:
    world = World()
    world.hello()
    key = world.request(deadline_s=1.0)
    world.sender.on_tick(time.monotonic() + 1.1)
    stopped = world.sent[-1]
    assert isinstance(stopped, Stopped) and stopped.failure is not None
    assert stopped.failure.code is FailureCode.DEADLINE and world.engine.released == [engine_id(key)]


def test_stopping_reports_every_live_transfer_and_closes_every_endpoint() -> None:
    world = World()
    world.hello()
    keys = [world.request(name) for name in ("a", "b")]
    world.sender.stop_all(Failure(FailureCode.DRAINING, "going"))
    world.run()
    assert [kind for kind in world.kinds() if kind is Stopped] == [Stopped, Stopped]
    assert world.engine.released == [engine_id(key) for key in keys] and world.sender.wait_idle(0)


def test_a_failed_post_ends_the_session_and_says_how_many_were_posted() -> None:
    """P26, the sender's half."""
    world = World(Faults(fail_post=3))
    world.hello()
    key = world.request()
    world.forward(key)
    world.run()
    stopped = [message for message in world.sent if isinstance(message, Stopped)]
    assert [message.posted for message in stopped] == [2]
    assert world.engine.released == [engine_id(key)] and world.sender.sessions == 0


class TakesNoSecondBatch(SimulatedEngine):
    """Of those that are armed on a word."""

    armed = 0

    def write_when(self, endpoint: Sending, word_address: int, threshold: int, batch: PageWrites) -> int:
        self.armed += 1
        if self.armed == 2:
            raise FabricUsageError("not that one")
        return super().write_when(endpoint, word_address, threshold, batch)


def test_a_batch_that_the_fabric_does_not_take_fails_its_transfer_alone() -> None:
    """P05, the sender's half: said at once, with what was posted, and the next one is served."""
    world = World(kind=TakesNoSecondBatch)
    world.hello()
    failing = world.request("failing")
    world.announce(failing)
    (stopped,) = [message for message in world.sent if isinstance(message, Stopped)]
    assert (stopped.key, stopped.posted) == (failing, 0)
    assert stopped.failure is not None and stopped.failure.code is FailureCode.TRANSFER_FAILED
    world.run()
    following = world.request("next")
    world.forward(following)
    world.run()
    assert world.kinds()[-1] is TransferFinished and world.sender.sessions == 1
    assert world.engine.released == [engine_id(failing), engine_id(following)]
