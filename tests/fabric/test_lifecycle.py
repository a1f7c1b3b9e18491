"""Waking, sleeping, closing: an engine costs nothing while idle and leaves nothing behind."""

import gc
import os
import threading
import time
from collections.abc import Callable

import pytest

from fabric.api import Arrived, EndpointFailed, Event, WritesEnded
from fabric.errors import FabricUsageError
from fabric.immediates import pack
from fabric.libfabric import LibfabricEngine, open_engine
from tests.fabric.conftest import Fabric, Link
from tests.fabric.party import Party, drive, pages, settle

PAGE = 4096
LONG = 30.0


class PumpThread:
    """An engine that is used by its own thread, in one long `progress`, as a node's messenger does."""

    def __init__(self, progress: Callable[[float], list[Event]]) -> None:
        self.events: list[Event] = []
        self._progress = progress
        self._thread = threading.Thread(target=self._run)
        self.started = time.monotonic()
        self._thread.start()

    def _run(self) -> None:
        self.events = self._progress(LONG)

    def finish(self) -> float:
        """Seconds that its `progress` took."""
        self._thread.join(LONG + 10)
        return time.monotonic() - self.started


A_FEW = range(1, 4)


def sleeps_of_idle_progress(engine: LibfabricEngine) -> int:
    """None: it did not sleep at all, but looked over and over."""
    before = engine.sleeps
    assert engine.progress(0.3) == []
    return engine.sleeps - before


def test_wake_ends_a_long_progress_from_another_thread(fabric: Fabric) -> None:
    party = fabric.party()
    party.engine.open_landing("peer")
    pump = PumpThread(party.engine.progress)
    party.engine.wake()
    assert pump.finish() < LONG
    assert pump.events == []


def test_wake_before_progress_ends_the_next_one_only(fabric: Fabric) -> None:
    engine = fabric.party().engine
    engine.wake()
    engine.wake()
    assert engine.progress(LONG) == []
    if isinstance(engine, LibfabricEngine):
        assert sleeps_of_idle_progress(engine) in A_FEW


def test_sleeping_engines_are_woken_by_connections_and_data(fabric: Fabric) -> None:
    """Both sides sit in one long `progress` before the first byte: descriptors alone must wake them."""
    link = Link(fabric)
    expectation = link.receiver.engine.expect(link.landing, pack(1, 1), 16)
    receiving = PumpThread(link.receiver.engine.progress)
    batch = pages(link.source_region, link.target_region.remote, list(range(16)), PAGE, pack(1, 1))
    handle = link.sender.engine.write(link.sending, batch)
    sending = PumpThread(link.sender.engine.progress)
    assert receiving.finish() < LONG
    assert [event.handle for event in receiving.events if isinstance(event, Arrived)] == [expectation]
    settle(link.receiver)  # the receiver must still acknowledge
    assert sending.finish() < LONG
    assert [event.handle for event in sending.events if isinstance(event, WritesEnded)] == [handle]


def test_an_idle_engine_sleeps_through(way: str) -> None:
    """Also after traffic, when descriptors might have stayed readable, and with a landing and a sending open."""
    link = Link(Fabric(way))
    for size in (0, PAGE):
        batch = pages(link.source_region, link.target_region.remote, list(range(16)), size, 1)
        link.sender.engine.write(link.sending, batch)
    drive(*link.both, until=lambda: len(link.sender.of(WritesEnded)) == 2)
    settle(*link.both)
    for party in link.both:
        assert isinstance(party.engine, LibfabricEngine)
        assert sleeps_of_idle_progress(party.engine) in A_FEW
    link.fabric.close()


def test_an_engine_that_never_had_traffic_sleeps_through(way: str) -> None:
    link = Link(Fabric(way))
    settle(*link.both)
    assert isinstance(link.receiver.engine, LibfabricEngine)
    assert sleeps_of_idle_progress(link.receiver.engine) in A_FEW
    link.fabric.close()


def test_close_is_idempotent_and_ends_the_engine(fabric: Fabric) -> None:
    link = Link(fabric)
    for party in link.both:
        party.engine.close()
        party.engine.close()
        party.engine.wake()
        with pytest.raises(FabricUsageError):
            party.engine.progress(0)
        with pytest.raises(FabricUsageError):
            party.engine.open_landing("peer")


def test_an_engine_closes_with_writes_outstanding_armed_and_unreported(fabric: Fabric) -> None:
    link = Link(fabric)
    batch = pages(link.source_region, link.target_region.remote, list(range(200)), PAGE, 1)
    engine = link.sender.engine
    for _ in range(3):
        engine.write(link.sending, batch)
    drive(*link.both, until=lambda: engine.counters().writes_completed > 10)
    engine.write_when(link.sending, link.source.ctypes.data, 1 << 63, batch)
    engine.cancel(engine.write(link.sending, batch))
    engine.close()
    settle(link.receiver)


def test_gauges_count_what_is_open(fabric: Fabric) -> None:
    link = Link(fabric)
    engine = link.receiver.engine
    handle = engine.expect(link.landing, pack(1, 1), 1)
    held = engine.gauges()
    assert (held.endpoints, held.regions, held.expectations) == (1, 1, 1)
    engine.forget(handle)
    engine.close_endpoint(link.landing)
    engine.deregister(link.target_region)
    held = engine.gauges()
    assert (held.endpoints, held.regions, held.expectations) == (0, 0, 0)


def census() -> tuple[int, int]:
    """Open descriptors and threads of this process; garbage, of other tests too, is gone first."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def transfer_once(provider: str) -> None:
    link = Link(Fabric(provider), size=64 << 10)
    link.sender.engine.write(link.sending, pages(link.source_region, link.target_region.remote, [0, 1], PAGE, 1))
    drive(*link.both, until=lambda: bool(link.sender.events))
    link.fabric.close()


@pytest.mark.parametrize("provider, pairs", [("net", 25), ("tcp;ofi_rxm", 5), ("same-host", 25)])
def test_many_engines_leave_no_descriptor_and_no_thread(provider: str, pairs: int) -> None:
    transfer_once(provider)
    before = census()
    for _ in range(pairs):
        transfer_once(provider)
    assert census() == before


@pytest.mark.parametrize("provider, times", [("net", 20), ("tcp;ofi_rxm", 5), ("same-host", 20)])
def test_endpoints_that_come_and_go_leave_no_descriptor(provider: str, times: int) -> None:
    sender, receiver = Party(open_engine(provider)), Party(open_engine(provider))
    (_, region), (_, target) = sender.memory(PAGE), receiver.memory(PAGE)

    def once() -> None:
        landing = receiver.engine.open_landing("sender")
        sending = sender.engine.connect("receiver", landing.address)
        ended = len(sender.of(WritesEnded))
        sender.engine.write(sending, pages(region, target.remote, [0], PAGE, 1))
        drive(sender, receiver, until=lambda: len(sender.of(WritesEnded)) > ended)
        sender.engine.close_endpoint(sending)
        settle(sender, receiver, turns=3)
        receiver.engine.close_endpoint(landing)

    once()
    before = census()
    for _ in range(times):
        once()
    assert census() == before
    assert receiver.of(EndpointFailed) == []  # a peer that closes after its last write did not fail
    for party in (sender, receiver):
        party.engine.close()
