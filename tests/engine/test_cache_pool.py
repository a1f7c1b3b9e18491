"""The pool's memory: geometry (P15 on T0), stable addresses, and poison on free pages."""

import ctypes
import mmap

import pytest

from engine.cache_pool import CachePool
from engine.errors import PoisonBroken
from protocol.layout import DType, KVLayout
from tests.engine.traces import T0


@pytest.mark.parametrize("blocks", [1, 2, 5, 6])
def test_p15_the_pool_is_blocks_times_block_bytes(blocks: int) -> None:
    pool = CachePool(T0, blocks)
    assert T0.block_bytes == 512
    assert (pool.bytes, pool.num_chunks, pool.free_chunks) == (512 * blocks, blocks, blocks)
    assert pool.pages.shape == (blocks, 2, 1, 2, 4, 8)
    assert pool.pages.is_contiguous()


def test_the_memory_is_page_aligned_and_what_the_address_says() -> None:
    pool = CachePool(T0, 4)
    assert pool.address % mmap.PAGESIZE == 0
    pool.pages[2, 1, 0, 1, 3, 5] = 42.0
    offset = 2 * T0.block_bytes + T0.page_bytes + (1 * 4 * 8 + 3 * 8 + 5) * 4
    assert ctypes.c_float.from_address(pool.address + offset).value == 42.0


def test_chunks_are_handed_out_once() -> None:
    pool = CachePool(T0, 8)
    taken = pool.take(3) + pool.take(5)
    assert sorted(taken) == list(range(8))
    pool.give_back(taken[:2])
    assert sorted(pool.take(2)) == sorted(taken[:2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_free_pages_are_not_a_number_in_debug_mode(dtype: DType) -> None:
    layout = KVLayout(layers=2, kv_heads=1, page_size=4, head_dim=8, dtype=dtype)
    pool = CachePool(layout, 3, debug_pages=True)
    assert pool.pages.isnan().all()
    (chunk,) = pool.take(1)
    pool.pages[chunk] = 1.0
    pool.give_back([chunk])
    assert pool.pages.isnan().all()


def test_a_write_to_a_free_page_is_found_when_it_is_taken_again() -> None:
    pool = CachePool(T0, 3, debug_pages=True)
    chunks = pool.take(3)
    pool.give_back(chunks)
    pool.pages[chunks[1], 1, 0, 0, 2, 3] = 0.0
    with pytest.raises(PoisonBroken, match=f"chunk {chunks[1]}.*layer 1"):
        pool.take(3)


def test_without_debug_mode_pages_are_left_as_they_are() -> None:
    pool = CachePool(T0, 1)
    (chunk,) = pool.take(1)
    pool.pages[chunk] = 3.0
    pool.give_back([chunk])
    assert (pool.pages == 3.0).all()
