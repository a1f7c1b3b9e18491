"""Address arithmetic and bounds of paged writes, against the plain definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.api import MemoryRegion, PageWrites, RailKey, RemoteRegion
from fabric.errors import FabricUsageError
from fabric.paged import check, check_word, writes

SIZE = 10_000


def batch(indices: list[int], stride: int, offset: int, length: int, base: int = 0) -> PageWrites:
    """The same arithmetic on both sides, over 10,000 bytes."""
    source = MemoryRegion(1, 1 << 40, SIZE, RemoteRegion((RailKey(0, 5),), base, SIZE))
    return PageWrites(source, indices, stride, offset, source.remote, indices, stride, offset, length, 1)


@given(
    st.lists(st.integers(-2, 40), max_size=8), st.integers(-1, 600), st.integers(-1, 9000), st.integers(-1, SIZE + 1)
)
def test_a_batch_is_accepted_exactly_if_every_write_stays_inside(
    indices: list[int], stride: int, offset: int, length: int
) -> None:
    starts = [index * stride + offset for index in indices]
    inside = min(stride, offset, length, *indices, 0) == 0 and all(s >= 0 and s + length <= SIZE for s in starts)
    if inside:
        check(batch(indices, stride, offset, length))
    else:
        with pytest.raises(FabricUsageError):
            check(batch(indices, stride, offset, length))


def test_addresses_count_from_the_region_here_and_from_the_base_there() -> None:
    assert list(writes(batch([2, 0], 100, 7, 50, base=1000))) == [
        ((1 << 40) + 207, 1207),
        ((1 << 40) + 7, 1007),
    ]


def test_ranges_are_indices_too() -> None:
    source = MemoryRegion(1, 0, SIZE, RemoteRegion((RailKey(0, 5),), 0, SIZE))
    ranged = PageWrites(source, range(3), 10, 0, source.remote, range(3, 0, -1), 10, 0, 10, 1)
    check(ranged)
    assert list(writes(ranged)) == [(0, 30), (10, 20), (20, 10)]


@pytest.mark.parametrize(
    "address, threshold", [(0, 1), (4, 1), (12345, 1), (1 << 64, 1), (-8, 1), (8, -1), (8, 1 << 64)]
)
def test_a_word_is_an_aligned_u64_and_so_is_its_threshold(address: int, threshold: int) -> None:
    with pytest.raises(FabricUsageError):
        check_word(address, threshold)


def test_the_last_byte_of_the_address_space_can_be_written_and_nothing_behind_it() -> None:
    check(batch([0], 0, 0, SIZE, base=(1 << 64) - SIZE))
    with pytest.raises(FabricUsageError):
        check(batch([0], 0, 0, SIZE, base=(1 << 64) - SIZE + 1))
