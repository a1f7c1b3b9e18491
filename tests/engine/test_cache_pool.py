"""The pool: one piece of memory, chunks of it, two kept back, and the poison that finds stray readers and writers."""

import pytest
import torch

from engine.cache_pool import CachePool
from engine.errors import PoisonBroken
from engine.geometry import full_geometry
from tests.engine.traces import T0, T1


def test_chunks_come_from_one_zeroed_page_aligned_piece_and_two_are_kept_back() -> None:
    pool = CachePool(full_geometry(T0), 5)
    assert (pool.bytes, pool.num_chunks, pool.free_chunks) == (512 * 7, 5, 5)
    assert pool.address % 4096 == 0
    assert not pool.raw_blocks(0).any()
    assert sorted(pool.take() for _ in range(5)) == [2, 3, 4, 5, 6]
    assert pool.free_chunks == 0


def test_the_chunk_freed_last_is_taken_first() -> None:
    pool = CachePool(full_geometry(T0), 4)
    first, second = pool.take(), pool.take()
    pool.give_back(first)
    pool.give_back(second)
    assert [pool.take(), pool.take()] == [second, first]


def test_each_group_sees_the_same_memory_as_blocks_of_its_own_size() -> None:
    pool = CachePool(T1, 3)
    assert pool.pages(0).shape == (15, 1, 1, 2, 4, 8)
    assert pool.pages(1).shape == (5, 3, 1, 2, 4, 8)
    pool.pages(1)[2, 1] = 7.0
    assert (pool.pages(0)[7] == 7.0).all(), "chunk 2, second of three pages"
    assert pool.address + 7 * T1.block_bytes[0] == pool.pages(1)[2, 1].data_ptr()


def test_free_blocks_read_as_nan_but_the_zero_chunk_does_not() -> None:
    pool = CachePool(full_geometry(T0), 3, debug_pages=True)
    assert torch.isnan(pool.pages(0)[1:]).all()
    assert not pool.pages(0)[0].any()


def test_a_write_to_a_free_block_is_found_when_it_is_taken() -> None:
    pool = CachePool(full_geometry(T0), 3, debug_pages=True)
    pool.poison(0, [3, 4])
    pool.check_poison(0, [3, 4])
    pool.pages(0)[4, 1, 0, 0, 2] = 1.0
    pool.check_poison(0, [3])
    with pytest.raises(PoisonBroken, match=r"block 4 .* 32 bytes, first in page 1"):
        pool.check_poison(0, [4])
