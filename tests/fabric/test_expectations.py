"""Immediates are counted per slot, generation and landing; an expectation arrives exactly once, or is overrun."""

import pytest

from fabric.api import Arrived, OverCounted, Sending, WritesEnded
from fabric.errors import EndpointClosed, FabricUsageError
from fabric.immediates import pack
from tests.fabric.conftest import Link
from tests.fabric.party import drive, pages, settle

PAGE = 512
NOW = pack(9, 5)
EARLIER = pack(9, 4)


def send(link: Link, immediate: int, count: int, over: Sending | None = None) -> None:
    """Writes `count` pages and waits until all of them landed."""
    batch = pages(link.source_region, link.target_region.remote, list(range(count)), PAGE, immediate)
    link.sender.engine.write(over or link.sending, batch)
    done = len(link.sender.of(WritesEnded)) + 1
    drive(*link.both, until=lambda: len(link.sender.of(WritesEnded)) == done)
    settle(link.receiver, turns=5)


def test_it_arrives_exactly_once(link: Link) -> None:
    handle = link.receiver.engine.expect(link.landing, NOW, 6)
    send(link, NOW, 4)
    assert link.receiver.events == []
    assert link.receiver.engine.counted(handle) == 4
    send(link, NOW, 2)
    (arrived,) = link.receiver.of(Arrived)
    assert (arrived.handle, arrived.count) == (handle, 6)
    assert 0 < arrived.first_ns <= arrived.last_ns
    settle(link.receiver)
    assert len(link.receiver.events) == 1


def test_an_earlier_generation_is_stale(link: Link) -> None:
    handle = link.receiver.engine.expect(link.landing, NOW, 2)
    send(link, EARLIER, 2)
    counters = link.receiver.engine.counters()
    assert (counters.stale_immediates, counters.immediates_counted) == (2, 0)
    assert link.receiver.engine.counted(handle) == 0 and link.receiver.events == []


def test_the_right_immediate_on_another_landing_is_stale(link: Link) -> None:
    other = link.receiver.engine.open_landing("other")
    over = link.sender.engine.connect("receiver", other.address)
    handle = link.receiver.engine.expect(link.landing, NOW, 3)
    send(link, NOW, 3, over=over)
    assert link.receiver.engine.counted(handle) == 0 and link.receiver.events == []
    assert link.receiver.engine.counters().stale_immediates == 3


def test_more_than_expected_is_reported_once(link: Link) -> None:
    handle = link.receiver.engine.expect(link.landing, NOW, 1)
    send(link, NOW, 1)
    send(link, NOW, 2)
    send(link, NOW, 1)
    (over,) = link.receiver.of(OverCounted)
    assert over.handle == handle and over.count in (2, 3)
    assert len(link.receiver.of(Arrived)) == 1
    assert link.receiver.engine.counters().over_counts == 3


def test_an_expectation_overrun_before_it_was_reported_has_not_arrived(link: Link) -> None:
    """Both immediates are there before the receiver looks."""
    handle = link.receiver.engine.expect(link.landing, NOW, 1)
    link.receiver.engine.revise(handle, 5)
    send(link, NOW, 3)
    link.receiver.engine.revise(handle, 2)
    settle(link.receiver)
    assert link.receiver.events == [OverCounted(handle, 3)]


def test_a_lower_count_that_was_seen_already_arrives(link: Link) -> None:
    handle = link.receiver.engine.expect(link.landing, NOW, 10)
    send(link, NOW, 4)
    link.receiver.engine.revise(handle, 4)
    drive(link.receiver, until=lambda: bool(link.receiver.events))
    (arrived,) = link.receiver.of(Arrived)
    assert (arrived.handle, arrived.count) == (handle, 4)


def test_revised_to_none_it_arrives_if_nothing_landed(link: Link) -> None:
    handle = link.receiver.engine.expect(link.landing, NOW, 10)
    link.receiver.engine.revise(handle, 0)
    drive(link.receiver, until=lambda: bool(link.receiver.events))
    assert link.receiver.events == [Arrived(handle, 0, 0, 0)]


def test_it_arrives_again_after_a_revision(link: Link) -> None:
    handle = link.receiver.engine.expect(link.landing, NOW, 2)
    send(link, NOW, 2)
    link.receiver.engine.revise(handle, 3)
    send(link, NOW, 1)
    assert [event.count for event in link.receiver.of(Arrived)] == [2, 3]


def test_what_is_forgotten_is_stale_and_its_slot_is_free(link: Link) -> None:
    handle = link.receiver.engine.expect(link.landing, EARLIER, 2)
    link.receiver.engine.forget(handle)
    send(link, EARLIER, 1)
    assert link.receiver.engine.counters().stale_immediates == 1
    link.receiver.engine.expect(link.landing, NOW, 1)
    send(link, NOW, 1)
    assert len(link.receiver.of(Arrived)) == 1


def test_forgetting_takes_back_an_event_that_was_not_reported_yet(link: Link) -> None:
    handle = link.receiver.engine.expect(link.landing, NOW, 1)
    link.receiver.engine.revise(handle, 0)
    link.receiver.engine.forget(handle)
    settle(link.receiver)
    assert link.receiver.events == []


def test_an_armed_slot_is_refused(link: Link) -> None:
    link.receiver.engine.expect(link.landing, NOW, 1)
    with pytest.raises(FabricUsageError):
        link.receiver.engine.expect(link.landing, EARLIER, 1)
    with pytest.raises(FabricUsageError):
        link.receiver.engine.expect(link.landing, pack(10, 1), 0)


def test_a_count_or_an_immediate_that_no_machine_has_is_refused(link: Link) -> None:
    engine = link.receiver.engine
    handle = engine.expect(link.landing, NOW, (1 << 63) - 1)
    for count in (-1, 1 << 63):
        with pytest.raises(FabricUsageError):
            engine.revise(handle, count)
        with pytest.raises(FabricUsageError):
            engine.expect(link.landing, pack(10, 1), count)
    for immediate in (-1, 1 << 32):
        with pytest.raises(FabricUsageError):
            engine.expect(link.landing, immediate, 1)
    settle(link.receiver)
    assert link.receiver.events == [] and engine.gauges().expectations == 1


def test_a_closed_landing_drops_its_expectations_without_events(link: Link) -> None:
    handle = link.receiver.engine.expect(link.landing, NOW, 3)
    link.receiver.engine.revise(handle, 0)
    link.receiver.engine.close_endpoint(link.landing)
    settle(link.receiver)
    assert link.receiver.events == []
    assert link.receiver.engine.gauges().expectations == 0
    link.receiver.engine.forget(handle)
    with pytest.raises(FabricUsageError):
        link.receiver.engine.counted(handle)
    with pytest.raises(FabricUsageError):
        link.receiver.engine.revise(handle, 1)
    with pytest.raises(EndpointClosed):
        link.receiver.engine.expect(link.landing, NOW, 1)


def test_all_slots_can_be_armed_at_once(link: Link) -> None:
    engine = link.receiver.engine
    handles = [engine.expect(link.landing, pack(slot, 1), 1) for slot in range(4096)]
    send(link, pack(4095, 1), 1)
    assert link.receiver.of(Arrived)[0].handle == handles[4095]
    for handle in handles:
        engine.forget(handle)
    assert engine.gauges().expectations == 0
