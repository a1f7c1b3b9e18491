"""Triggered writes: a batch is posted once its word reached the threshold, and not before."""

import numpy as np
import pytest

from fabric.api import PageWrites, WritesEnded
from fabric.errors import FabricUsageError
from fabric.immediates import pack
from fabric.libfabric import LibfabricEngine, open_engine
from tests.fabric.conftest import Fabric, Link
from tests.fabric.party import Party, drive, pages, settle

PAGE = 4096


class Word:
    """A u64 that the test counts up, as an engine counts layers."""

    def __init__(self, value: int = 0) -> None:
        self._data = np.array([value], np.uint64)
        self.address = self._data.ctypes.data

    def reach(self, value: int) -> None:
        self._data[0] = value


def page(link: Link, index: int) -> PageWrites:
    return pages(link.source_region, link.target_region.remote, [index], PAGE, pack(index, 1))


def landed(link: Link) -> list[int]:
    return [i for i in range(8) if link.target[i * PAGE : (i + 1) * PAGE].any()]


def arm(link: Link, word: Word, threshold: int) -> int:
    """Page `threshold` is armed on that threshold."""
    return link.sender.engine.write_when(link.sending, word.address, threshold, page(link, threshold))


def ended(link: Link) -> list[int]:
    return [event.handle for event in link.sender.of(WritesEnded)]


def test_nothing_is_posted_below_the_threshold(link: Link) -> None:
    word = Word(4)
    arm(link, word, 5)
    settle(*link.both)
    assert landed(link) == [] and ended(link) == []
    assert link.sender.engine.gauges().armed == 1
    word.reach(5)
    drive(*link.both, until=lambda: len(ended(link)) == 1)
    assert landed(link) == [5]
    assert link.sender.engine.gauges().armed == 0


def test_a_threshold_that_was_reached_before_fires_at_once(link: Link) -> None:
    arm(link, Word(7), 3)
    drive(*link.both, until=lambda: len(ended(link)) == 1)
    assert landed(link) == [3]


def test_thresholds_fire_by_value_whatever_the_order_of_arming(link: Link) -> None:
    word = Word()
    for threshold in (3, 1, 5, 2, 4):
        arm(link, word, threshold)
    for value in range(1, 6):
        word.reach(value)
        drive(*link.both, until=lambda: bool(ended(link)) and len(ended(link)) == landed(link)[-1] == value)  # noqa: B023
        assert landed(link) == list(range(1, value + 1))


def test_a_word_that_jumps_fires_everything_that_it_passed(link: Link) -> None:
    word = Word()
    handles = {threshold: arm(link, word, threshold) for threshold in (6, 2, 4, 1)}
    word.reach(4)
    drive(*link.both, until=lambda: len(ended(link)) == 3)
    settle(*link.both)
    assert landed(link) == [1, 2, 4]
    assert set(ended(link)) == {handles[1], handles[2], handles[4]}


def test_several_words_are_watched_apart(link: Link) -> None:
    first, second = Word(), Word()
    arm(link, first, 1)
    arm(link, second, 2)
    second.reach(5)
    drive(*link.both, until=lambda: len(ended(link)) == 1)
    settle(*link.both)
    assert landed(link) == [2]


def test_an_armed_batch_that_is_cancelled_is_never_posted(link: Link) -> None:
    word = Word()
    cancelled, kept = arm(link, word, 1), arm(link, word, 2)
    assert link.sender.engine.cancel(cancelled) == (0, 0)
    word.reach(2)
    drive(*link.both, until=lambda: len(ended(link)) == 2)
    by_handle = {event.handle: event for event in link.sender.of(WritesEnded)}
    assert (by_handle[cancelled].cancelled, by_handle[cancelled].posted) == (True, 0)
    assert (by_handle[kept].cancelled, by_handle[kept].posted) == (False, 1)
    assert landed(link) == [2]


def test_a_word_must_be_an_aligned_address(link: Link) -> None:
    for address in (0, Word().address + 4, -8, 1 << 64):
        with pytest.raises(FabricUsageError):
            link.sender.engine.write_when(link.sending, address, 1, page(link, 1))


@pytest.mark.parametrize("threshold", [-1, 1 << 64])
def test_a_threshold_is_what_a_word_can_hold(link: Link, threshold: int) -> None:
    with pytest.raises(FabricUsageError):
        link.sender.engine.write_when(link.sending, Word().address, threshold, page(link, 1))
    assert link.sender.engine.gauges().armed == 0


def test_a_long_wait_for_a_word_costs_few_looks() -> None:
    """The first milliseconds are looked at every 20 us, a second is not: naps grow with the wait."""
    engine = open_engine("net")
    receiver = Party(open_engine("net"))
    landing = receiver.engine.open_landing("sender")
    word, (_, region), (_, target) = Word(), Party(engine).memory(PAGE), receiver.memory(PAGE)
    engine.write_when(
        engine.connect("receiver", landing.address), word.address, 1, pages(region, target.remote, [0], PAGE, 1)
    )
    assert engine.progress(1.0) == []
    assert engine.sleeps < 2000
    engine.close()
    receiver.engine.close()


def test_a_word_that_leaves_its_beat_is_looked_at_between_naps_again() -> None:
    net = Fabric("net")
    link, word = Link(net), Word()
    sender = link.sender.engine
    assert isinstance(sender, LibfabricEngine)
    for threshold in range(1, 4):
        arm(link, word, threshold)
    for threshold in range(1, 3):
        word.reach(threshold)
        drive(*link.both, until=lambda count=threshold: len(ended(link)) == count)  # type: ignore[misc]
    before = sender.sleeps
    assert sender.progress(1.0) == []
    assert 10 < sender.sleeps - before < 2000
    word.reach(3)
    drive(*link.both, until=lambda: len(ended(link)) == 3)
    net.close()


@pytest.mark.parametrize("batches", [600])
def test_more_events_than_one_call_returns_are_all_reported(fabric: Fabric, batches: int) -> None:
    link, word = Link(fabric), Word()
    handles = [link.sender.engine.write_when(link.sending, word.address, 1, page(link, 0)) for _ in range(batches)]
    word.reach(1)
    drive(*link.both, until=lambda: len(ended(link)) == batches)
    assert sorted(ended(link)) == handles
