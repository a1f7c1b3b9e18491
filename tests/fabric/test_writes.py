"""What is written lands byte-exact, is counted once, and is reported once; what cannot be written is an error."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabric.api import EndpointFailed, PageWrites, RailKey, WritesEnded, WritesFailed
from fabric.errors import EndpointClosed, FabricUsageError
from fabric.immediates import MAX_GENERATION, pack
from fabric.limits import Limits
from tests.fabric.conftest import Fabric, Link
from tests.fabric.party import NOWHERE, drive, pages, settle, wrong_keys
from tests.fabric.shared_memory import Bytes

PAGE = 4096


def land(link: Link, batch: PageWrites) -> WritesEnded:
    """Writes a batch and waits for both sides' word on it."""
    expectation = link.receiver.engine.expect(link.landing, batch.immediate, len(batch.source_indices))
    handle = link.sender.engine.write(link.sending, batch)
    seen = len(link.sender.events), len(link.receiver.events)
    drive(*link.both, until=lambda: len(link.sender.events) > seen[0] and len(link.receiver.events) > seen[1])
    link.receiver.engine.forget(expectation)
    ended = link.sender.events[-1]
    assert isinstance(ended, WritesEnded) and ended.handle == handle and ended.error is None
    return ended


def test_pages_land_where_their_indices_say(link: Link) -> None:
    order = [5, 0, 9, 3]
    batch = PageWrites(
        link.source_region, order, PAGE, 0, link.target_region.remote, [1, 2, 7, 4], PAGE, 0, PAGE, pack(0, 1)
    )
    land(link, batch)
    expected = np.zeros_like(link.target)
    for i, j in zip(order, [1, 2, 7, 4], strict=True):
        expected[j * PAGE : (j + 1) * PAGE] = link.source[i * PAGE : (i + 1) * PAGE]
    assert np.array_equal(link.target, expected)


Side = tuple[int, int]  # stride, offset


@st.composite
def paged_shapes(draw: st.DrawFn) -> tuple[list[int], Side, list[int], Side, int]:
    """Strides larger than the length on the target side, so that no two writes overlap."""
    length = draw(st.integers(1, 5000))
    count = draw(st.integers(1, 20))
    source = draw(st.lists(st.integers(0, 30), min_size=count, max_size=count))
    target = draw(st.lists(st.integers(0, 30), min_size=count, max_size=count, unique=True))
    sides = [(length + draw(st.integers(0, 3000)), draw(st.integers(0, 9000))) for _ in range(2)]
    return source, sides[0], target, sides[1], length


def oracle(source: Bytes, target: Bytes, batch: PageWrites) -> Bytes:
    """The same writes by numpy."""
    result = target.copy()
    for i, j in zip(batch.source_indices, batch.target_indices, strict=True):
        start = i * batch.source_stride + batch.source_offset
        at = j * batch.target_stride + batch.target_offset
        result[at : at + batch.length] = source[start : start + batch.length]
    return result


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=paged_shapes())
def test_any_indices_strides_and_offsets_land_byte_exact(
    link: Link, shape: tuple[list[int], Side, list[int], Side, int]
) -> None:
    indices, (stride, offset), target_indices, (target_stride, target_offset), length = shape
    remote = link.target_region.remote
    batch = PageWrites(
        link.source_region, indices, stride, offset, remote, target_indices, target_stride, target_offset, length, 99
    )
    expected = oracle(link.source, link.target, batch)
    ended = land(link, batch)
    assert np.array_equal(link.target, expected)
    assert (ended.posted, ended.completed, ended.bytes) == (len(indices), len(indices), len(indices) * length)


def test_a_write_without_bytes_carries_its_immediate(link: Link) -> None:
    land(link, pages(link.source_region, link.target_region.remote, [0], 0, pack(4095, MAX_GENERATION)))
    assert not link.target.any()
    assert link.receiver.engine.counters().immediates_counted == 1


def test_a_batch_without_writes_ends_at_once(link: Link) -> None:
    link.sender.engine.write(link.sending, pages(link.source_region, link.target_region.remote, [], PAGE, 1))
    drive(link.sender, until=lambda: bool(link.sender.events))
    (ended,) = link.sender.of(WritesEnded)
    assert (ended.posted, ended.completed, ended.error, ended.first_posted_ns) == (0, 0, None, 0)


def test_many_batches_end_once_each_with_times_in_order(link: Link) -> None:
    count = 40
    expectation = link.receiver.engine.expect(link.landing, pack(1, 1), count * 8)
    batch = pages(link.source_region, link.target_region.remote, list(range(8)), PAGE, pack(1, 1))
    handles = [link.sender.engine.write(link.sending, batch) for _ in range(count)]
    drive(*link.both, until=lambda: len(link.sender.events) == count and bool(link.receiver.events))
    assert sorted(event.handle for event in link.sender.of(WritesEnded)) == handles
    for event in link.sender.of(WritesEnded):
        assert 0 < event.first_posted_ns <= event.last_posted_ns <= event.completed_ns
    assert link.receiver.engine.counted(expectation) == count * 8
    counters = link.sender.engine.counters()
    assert (counters.writes_posted, counters.writes_completed) == (count * 8, count * 8)
    assert link.sender.engine.gauges().outstanding == 0
    assert counters.bytes_posted == count * 8 * PAGE


def test_a_batch_that_leaves_its_regions_is_refused(link: Link) -> None:
    source, remote, size = link.source_region, link.target_region.remote, link.source.size
    for batch in (
        pages(source, remote, [size // PAGE], PAGE, 1),
        PageWrites(source, [0], 0, size - 8, remote, [0], 0, 0, 9, 1),
        PageWrites(source, [0], 0, 0, remote, [0], 0, size - 8, 9, 1),
        PageWrites(source, [-1], PAGE, 0, remote, [0], PAGE, 0, PAGE, 1),
        PageWrites(source, [0], PAGE, 0, remote, [0, 1], PAGE, 0, PAGE, 1),
    ):
        with pytest.raises(FabricUsageError):
            link.sender.engine.write(link.sending, batch)


TOO_LARGE = 1 << 64


@pytest.mark.parametrize("indices", [[], [0]])
def test_numbers_that_no_machine_has_are_refused(link: Link, indices: list[int]) -> None:
    """They may come from a peer: never an OverflowError, and never an address that wraps around."""
    fine = pages(link.source_region, link.target_region.remote, indices, 1, 1)
    remote = fine.target
    for batch in (
        replace(fine, target=replace(remote, base=TOO_LARGE)),
        replace(fine, target=replace(remote, base=-1)),
        replace(fine, target=replace(remote, base=TOO_LARGE - 8, length=64), target_offset=8),
        replace(fine, target=replace(remote, length=2 * TOO_LARGE), target_offset=TOO_LARGE - remote.base),
        replace(fine, target=replace(remote, keys=(RailKey(0, TOO_LARGE),))),
        replace(fine, target=replace(remote, keys=(RailKey(0, -1),))),
        replace(fine, source_stride=TOO_LARGE),
        replace(fine, target_stride=TOO_LARGE),
        replace(fine, target_offset=TOO_LARGE),
        replace(fine, source_offset=-1),
        replace(fine, length=TOO_LARGE),
        replace(fine, immediate=1 << 32),
        replace(fine, immediate=-1),
    ):
        with pytest.raises(FabricUsageError):
            link.sender.engine.write(link.sending, batch)
    assert link.sender.engine.gauges().outstanding == 0 and link.sender.engine.progress(0) == []


def test_an_index_that_only_a_stride_of_nothing_keeps_inside_is_refused(link: Link) -> None:
    fine = pages(link.source_region, link.target_region.remote, [0], 1, 1)
    for batch in (
        replace(fine, source_indices=[TOO_LARGE], source_stride=0),
        replace(fine, target_indices=[TOO_LARGE], target_stride=0),
    ):
        with pytest.raises(FabricUsageError):
            link.sender.engine.write(link.sending, batch)


def test_an_unregistered_source_is_refused(link: Link) -> None:
    link.sender.engine.deregister(link.source_region)
    with pytest.raises(FabricUsageError):
        link.sender.engine.write(link.sending, pages(link.source_region, link.target_region.remote, [0], PAGE, 1))
    with pytest.raises(FabricUsageError):
        link.sender.engine.deregister(link.source_region)


@pytest.mark.parametrize("wrong", ["key", "length", "deregistered"])
def test_a_write_that_the_peer_must_refuse_fails(link: Link, wrong: str) -> None:
    """Wrong key, a length that the peer never registered, a region that is gone: an error, and no byte."""
    remote, size = link.target_region.remote, link.target.size
    index = size // PAGE if wrong == "length" else 0
    remote = replace(remote, length=size + PAGE * (wrong == "length"))
    if wrong == "key":
        remote = wrong_keys(remote)
    if wrong == "deregistered":
        link.receiver.engine.deregister(link.target_region)
    batch = PageWrites(link.source_region, [0], 0, 0, remote, [index], PAGE, 0, PAGE, pack(3, 1))
    handle = link.sender.engine.write(link.sending, batch)
    drive(*link.both, until=lambda: bool(link.sender.of(WritesEnded)) and bool(link.sender.of(EndpointFailed)))
    (failed,), (ended,) = link.sender.of(WritesFailed), link.sender.of(WritesEnded)
    assert (failed.handle, failed.posted) == (ended.handle, ended.posted) == (handle, 1)
    assert ended.completed == 0 and ended.error == failed.error
    assert failed.error.code and failed.error.text and failed.error.peer == "receiver"
    assert not link.target.any()


def test_after_a_failure_new_writes_on_the_endpoint_fail_at_once(link: Link) -> None:
    remote = link.target_region.remote
    wrong = wrong_keys(remote)
    link.sender.engine.write(link.sending, pages(link.source_region, wrong, [0], PAGE, 1))
    drive(*link.both, until=lambda: bool(link.sender.of(EndpointFailed)))
    handle = link.sender.engine.write(link.sending, pages(link.source_region, remote, [0], PAGE, 1))
    word = np.zeros(1, np.uint64)
    armed = link.sender.engine.write_when(
        link.sending, word.ctypes.data, 9, pages(link.source_region, remote, [0], PAGE, 1)
    )
    drive(link.sender, until=lambda: len(link.sender.of(WritesEnded)) == 3)
    assert {event.handle: event.posted for event in link.sender.of(WritesFailed)[1:]} == {handle: 0, armed: 0}


def test_another_endpoint_to_the_same_peer_is_unharmed_by_the_failure_of_one(link: Link) -> None:
    other_landing = link.receiver.engine.open_landing("sender")
    other = link.sender.engine.connect("receiver", other_landing.address)
    remote = link.target_region.remote
    wrong = wrong_keys(remote)
    link.receiver.engine.expect(other_landing, pack(2, 1), 16)
    link.sender.engine.write(link.sending, pages(link.source_region, wrong, [0], PAGE, 1))
    good = link.sender.engine.write(other, pages(link.source_region, remote, list(range(16)), PAGE, pack(2, 1)))
    drive(*link.both, until=lambda: len(link.sender.of(WritesEnded)) == 2 and bool(link.receiver.events))
    assert next(e for e in link.sender.of(WritesEnded) if e.handle == good).error is None
    assert np.array_equal(link.target[: 16 * PAGE], link.source[: 16 * PAGE])


def test_a_closed_sending_endpoint_refuses_writes_and_ends_its_batches(link: Link) -> None:
    word = np.zeros(1, np.uint64)
    batch = pages(link.source_region, link.target_region.remote, [0, 1], PAGE, 1)
    armed = link.sender.engine.write_when(link.sending, word.ctypes.data, 1, batch)
    link.sender.engine.close_endpoint(link.sending)
    with pytest.raises(EndpointClosed):
        link.sender.engine.write(link.sending, batch)
    with pytest.raises(EndpointClosed):
        link.sender.engine.close_endpoint(link.sending)
    word[0] = 1
    settle(*link.both)
    (ended,) = link.sender.of(WritesEnded)
    assert (ended.handle, ended.cancelled, ended.posted, ended.error) == (armed, True, 0, None)
    assert not link.target.any()


def test_closing_a_sending_endpoint_ends_what_was_in_flight(fabric: Fabric) -> None:
    link = Link(fabric)
    land(link, pages(link.source_region, link.target_region.remote, [0], PAGE, pack(1, 1)))
    fabric.stall(link.receiver)
    handle = link.sender.engine.write(
        link.sending, pages(link.source_region, link.target_region.remote, list(range(64)), PAGE, pack(2, 1))
    )
    drive(link.sender, until=lambda: link.sender.engine.gauges().outstanding >= 32)
    link.sender.engine.close_endpoint(link.sending)
    drive(link.sender, until=lambda: any(event.handle == handle for event in link.sender.of(WritesEnded)))
    assert link.sender.of(WritesEnded)[-1].cancelled
    assert link.sender.engine.gauges().outstanding == 0
    fabric.resume(link.receiver)
    settle(*link.both)


@pytest.mark.parametrize("address", [b"", b"short", bytes(16), bytes(500)])
def test_an_address_that_is_none_makes_an_endpoint_that_fails(fabric: Fabric, address: bytes) -> None:
    """It came in a peer's message: not our caller's mistake."""
    sender = fabric.party(Limits(connect_seconds=0.3))
    _, region = sender.memory(PAGE)
    sending = sender.engine.connect("peer", address)
    handle = sender.engine.write(sending, pages(region, NOWHERE, [0], PAGE, 1))
    drive(sender, until=lambda: bool(sender.of(EndpointFailed)) and bool(sender.of(WritesEnded)))
    (ended,) = sender.of(WritesEnded)
    assert ended.handle == handle and ended.completed == 0 and ended.error


@pytest.mark.parametrize("address, length", [(0, 10), (4096, 0), (4096, -1), (1 << 64, 1), ((1 << 64) - 8, 9)])
def test_what_cannot_be_memory_is_not_registered(fabric: Fabric, address: int, length: int) -> None:
    with pytest.raises(FabricUsageError):
        fabric.party().engine.register(address, length)
