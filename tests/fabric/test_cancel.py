"""Cancelling, and the cap on outstanding writes that makes a batch stand half posted."""

import numpy as np

from fabric.api import WritesEnded
from fabric.immediates import pack
from fabric.limits import Limits
from tests.fabric.conftest import Fabric, Link
from tests.fabric.party import drive, pages, settle

PAGE = 4096
CAP = 6
"""In all, over one, two or three rails."""


def connected(fabric: Fabric) -> Link:
    """A link with a small cap, over each rail of which one write has gone, and whose receiver is stalled now."""
    share = CAP // fabric.rails
    link = Link(fabric, limits=Limits(endpoint_writes=share, domain_writes=share))
    first = [0] * fabric.rails
    link.sender.engine.write(link.sending, pages(link.source_region, link.target_region.remote, first, PAGE, 1))
    drive(*link.both, until=lambda: bool(link.sender.events))
    link.sender.events.clear()
    fabric.stall(link.receiver)
    return link


def test_no_more_than_the_cap_is_outstanding(fabric: Fabric) -> None:
    link = connected(fabric)
    engine = link.sender.engine
    engine.write(link.sending, pages(link.source_region, link.target_region.remote, list(range(32)), PAGE, 2))
    drive(link.sender, until=lambda: engine.gauges().outstanding == CAP)
    settle(link.sender)
    assert engine.gauges().outstanding == CAP
    assert engine.counters().writes_posted == fabric.rails + CAP
    fabric.resume(link.receiver)
    drive(*link.both, until=lambda: bool(link.sender.events))
    assert engine.gauges().outstanding == 0
    assert np.array_equal(link.target[: 32 * PAGE], link.source[: 32 * PAGE])


def test_a_half_posted_batch_stops_where_it_is_and_accounts_for_what_it_posted(fabric: Fabric) -> None:
    link = connected(fabric)
    engine = link.sender.engine
    expectation = link.receiver.engine.expect(link.landing, pack(5, 1), 32)
    batch = pages(link.source_region, link.target_region.remote, list(range(32)), PAGE, pack(5, 1))
    handle = engine.write(link.sending, batch)
    drive(link.sender, until=lambda: engine.gauges().outstanding == CAP)
    assert engine.cancel(handle) == (CAP, 0)
    assert engine.cancel(handle) == (CAP, 0)
    settle(link.sender)
    assert link.sender.events == []
    fabric.resume(link.receiver)
    drive(*link.both, until=lambda: bool(link.sender.events))
    settle(*link.both)
    (ended,) = link.sender.of(WritesEnded)
    assert (ended.handle, ended.posted, ended.completed, ended.cancelled) == (handle, CAP, CAP, True)
    assert ended.bytes == CAP * PAGE
    assert link.receiver.engine.counted(expectation) == CAP
    assert not link.target[CAP * PAGE :].any()


def test_a_cancelled_batch_makes_room_for_the_next(fabric: Fabric) -> None:
    link = connected(fabric)
    engine = link.sender.engine
    many = pages(link.source_region, link.target_region.remote, list(range(32)), PAGE, 2)
    first = engine.write(link.sending, many)
    second = engine.write(link.sending, pages(link.source_region, link.target_region.remote, [40], PAGE, 3))
    drive(link.sender, until=lambda: engine.gauges().outstanding == CAP)
    engine.cancel(first)
    fabric.resume(link.receiver)
    drive(*link.both, until=lambda: len(link.sender.events) == 2)
    assert {event.handle for event in link.sender.of(WritesEnded)} == {first, second}
    assert link.target[40 * PAGE : 41 * PAGE].any()


def test_a_cancelled_batch_takes_its_waiting_along(provider: str) -> None:
    """It could not be posted for a while and is cancelled; the next one has the whole of connect_seconds again."""
    link = Link(Fabric(provider), limits=Limits(connect_seconds=0.4))
    engine, batch = link.sender.engine, pages(link.source_region, link.target_region.remote, [0], PAGE, 1)
    cancelled = engine.write(link.sending, batch)
    settle(link.sender, turns=1)  # the first try starts to connect, to a receiver that does not answer
    engine.cancel(cancelled)
    drive(link.sender, until=lambda: bool(link.sender.events))
    assert engine.progress(0.5) == []
    handle = engine.write(link.sending, batch)
    settle(link.sender, turns=1)
    drive(*link.both, until=lambda: len(link.sender.of(WritesEnded)) == 2)
    link.fabric.close()
    assert [(event.handle, event.error) for event in link.sender.of(WritesEnded)] == [(cancelled, None), (handle, None)]


def test_an_ended_batch_answers_with_its_counts_until_its_end_was_reported(fabric: Fabric) -> None:
    """Closing ends six hundred batches at once, more than one `progress` reports."""
    link = connected(fabric)
    engine = link.sender.engine
    fabric.resume(link.receiver)
    before = engine.counters().writes_completed
    large = pages(link.source_region, link.target_region.remote, list(range(200)), PAGE, 2)
    handles = [engine.write(link.sending, large) for _ in range(600)]
    drive(*link.both, until=lambda: engine.counters().writes_completed - before > 8)
    engine.close_endpoint(link.sending)
    final = {handle: engine.cancel(handle) for handle in handles}
    posted, completed = (sum(counts) for counts in zip(*final.values(), strict=True))
    assert posted >= completed >= 8 and final[handles[-1]] == (0, 0)
    while len(link.sender.events) < len(handles):
        link.sender.events += engine.progress(0)
        reported = {event.handle: (event.posted, event.completed) for event in link.sender.of(WritesEnded)}
        assert reported == {handle: final[handle] for handle in reported}
        for handle in handles:
            assert engine.cancel(handle) == ((0, 0) if handle in reported else final[handle])


def test_unknown_and_reported_handles_cancel_to_nothing(link: Link) -> None:
    handle = link.sender.engine.write(link.sending, pages(link.source_region, link.target_region.remote, [0], PAGE, 1))
    drive(*link.both, until=lambda: bool(link.sender.events))
    assert link.sender.engine.cancel(handle) == (0, 0)
    assert link.sender.engine.cancel(12345) == (0, 0)


def test_a_stalled_peer_does_not_block_another(fabric: Fabric) -> None:
    """The stalled one holds the whole domain's cap; the other still has its share of it."""
    link = connected(fabric)
    sender, other = link.sender, fabric.party()
    memory, region = other.memory(32 * PAGE, fill=0)
    to_other = sender.engine.connect("other", other.engine.open_landing("sender").address)
    everything = list(range(32))
    sender.engine.write(link.sending, pages(link.source_region, link.target_region.remote, everything, PAGE, 2))
    drive(sender, until=lambda: sender.engine.gauges().outstanding == CAP)
    handle = sender.engine.write(to_other, pages(link.source_region, region.remote, everything, PAGE, 3))
    drive(sender, other, until=lambda: bool(sender.events))
    (ended,) = sender.of(WritesEnded)
    assert (ended.handle, ended.completed) == (handle, 32)
    assert np.array_equal(memory, link.source[: 32 * PAGE])
    assert sender.engine.gauges().outstanding == CAP
