"""The ring of a sliding layer against a plain record of what lies in each slot."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.ring import cached_positions, slots, stored_positions
from engine.geometry import AttentionType, LayerGroup


def pages_held(length: int, window: int, page_size: int) -> int:
    return LayerGroup(AttentionType.SLIDING, (0,), window).pages_for(length, page_size)


class Ring:
    """Slot by slot, the position written there last; the table grows as the allocator would grow it."""

    def __init__(self, page_size: int, window: int) -> None:
        self.page_size = page_size
        self.window = window
        self.past = 0
        self.holds: dict[int, int] = {}

    def step(self, count: int) -> list[int]:
        """Read, then write `count` new tokens; what was read, slot by slot, as positions."""
        seen = cached_positions(self.past, self.window)
        read = [self.holds[slot] for slot in slots(seen, self.window)]
        end = self.past + count
        written = stored_positions(self.past, end, self.window)
        for position, slot in zip(written, slots(written, self.window), strict=True):
            assert slot // self.page_size < pages_held(end, self.window, self.page_size), "past the end of the table"
            self.holds[slot] = position
        self.past = end
        return read


def assert_round_trip(page_size: int, window: int, counts: list[int]) -> None:
    ring = Ring(page_size, window)
    for count in counts:
        past = ring.past
        assert ring.step(count) == list(range(max(0, past - window + 1), past))


@pytest.mark.parametrize(("page_size", "window"), [(4, 8), (4, 4), (16, 32), (4, 6), (8, 3)])
@pytest.mark.parametrize(
    "counts", [[3] + [1] * 16, [8] + [1] * 16, [11] + [1] * 16, [3, 5, 4, 10, 2] + [1] * 8], ids=str
)
def test_every_read_returns_the_last_positions_in_order(page_size: int, window: int, counts: list[int]) -> None:
    assert_round_trip(page_size, window, counts)


@settings(deadline=None)
@given(
    page_size=st.integers(4, 16),
    window=st.integers(1, 40),
    counts=st.lists(st.integers(1, 50), min_size=1, max_size=30),
)
def test_so_it_is_for_any_window_and_any_chunks(page_size: int, window: int, counts: list[int]) -> None:
    assert_round_trip(page_size, window, counts)


def test_only_the_last_tokens_of_a_long_chunk_are_stored() -> None:
    assert list(stored_positions(0, 10, 6)) == [4, 5, 6, 7, 8, 9]
    assert slots(stored_positions(0, 10, 6), 6) == [4, 5, 0, 1, 2, 3]


def test_a_token_takes_the_slot_of_the_one_that_it_no_longer_sees() -> None:
    assert list(cached_positions(10, 6)) == [5, 6, 7, 8, 9]
    assert slots(cached_positions(10, 6), 6) == [5, 0, 1, 2, 3]
    assert slots(stored_positions(10, 11, 6), 6) == [4]


def test_a_ring_grows_with_its_request_up_to_the_window() -> None:
    assert [pages_held(length, 6, 4) for length in (1, 4, 5, 6, 7, 100)] == [1, 1, 2, 2, 2, 2]
    assert [pages_held(length, 8, 4) for length in (4, 5, 8, 9)] == [1, 2, 2, 2]
    assert pages_held(1000, 3, 8) == 1, "a window shorter than a page"


def test_a_window_of_one_token_reads_nothing() -> None:
    assert not cached_positions(7, 1)
    assert list(stored_positions(0, 7, 1)) == [6]


def test_long_lives(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(20):
        counts = [source.choice([1, 1, 1, source.randint(2, 100)]) for _ in range(100)]
        assert_round_trip(source.choice([4, 8, 16]), source.randint(1, 70), counts)
