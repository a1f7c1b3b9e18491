"""How many blocks a request of so many tokens holds, and how chunks change hands: P15 to P20."""

from dataclasses import replace

import pytest

from engine.allocators import FullAttentionCacheAllocator, SlidingAttentionCacheAllocator
from engine.cache_manager import CacheManager
from engine.cache_pool import CachePool
from engine.geometry import UNBOUNDED, AttentionType, CacheGeometry, LayerGroup, full_geometry
from engine.request import Owner
from tests.engine.traces import T0, T1, Harness

A, B = Owner("A", 1), Owner("B", 1)
P18 = CacheGeometry(
    page_size=4,
    kv_heads=1,
    head_dim=1,
    dtype="float32",
    groups=(LayerGroup(AttentionType.FULL, (0,)), LayerGroup(AttentionType.SLIDING, (1,), window=8)),
)
"""Pages of 32 bytes: a chunk of 128 bytes is 4 blocks of either type."""


def test_p17_prompts_hold_whole_pages() -> None:
    h = Harness(tokens=64)
    for length in (3, 4, 5, 8):
        h.add(f"p{length}", length, 2)
    h.step()
    assert {length: h.blocks(f"p{length}") for length in (3, 4, 5, 8)} == {3: 1, 4: 1, 5: 2, 8: 2}


def test_p17_a_block_is_taken_when_its_first_token_is_written() -> None:
    h = Harness()
    h.add("A", 4, 6)
    held = []
    for _ in range(6):
        h.step()
        held.append(h.blocks("A"))
    assert held == [1, 2, 2, 2, 2, 0]


def test_full_attention_needs_a_block_for_every_page_of_tokens() -> None:
    allocator = FullAttentionCacheAllocator(CachePool(full_geometry(T0), 4), 0)
    assert [allocator.blocks_for(n) for n in (0, 1, 4, 5, 16)] == [0, 1, 1, 2, 4]
    assert [allocator.capacity(n) for n in (0, 1, 4)] == [0, 4, 16]


@pytest.mark.parametrize(
    ("window", "blocks", "whole"), [(8, [0, 1, 1, 2, 2, 2], 2), (6, [0, 1, 1, 2, 2, 2], 2), (3, [0, 1, 1, 1, 1, 1], 1)]
)
def test_a_ring_grows_to_its_window_and_no_further(window: int, blocks: list[int], whole: int) -> None:
    groups = (LayerGroup(AttentionType.FULL, (3,)), LayerGroup(AttentionType.SLIDING, (0, 1, 2), window))
    allocator = SlidingAttentionCacheAllocator(CachePool(replace(T1, groups=groups), 4), 1)
    assert [allocator.blocks_for(n) for n in (0, 1, 4, 5, 9, 1000)] == blocks
    assert allocator.capacity(whole) == UNBOUNDED
    assert allocator.capacity(whole - 1) == 4 * (whole - 1)


def test_p18_all_or_nothing_over_both_groups() -> None:
    enough, short = CacheManager(CachePool(P18, 3)), CacheManager(CachePool(P18, 2))
    assert enough.can_hold(A, 32)
    enough.hold(A, 32)
    assert [len(table) for table in enough.tables(A)] == [8, 2]
    assert enough.pool.free_chunks == 0
    assert not short.can_hold(A, 32)
    assert (short.pool.free_chunks, short.holds(A)) == (2, False)
    assert short.can_hold(A, 0)


def test_blocks_come_from_chunks_in_use_before_a_new_one_is_opened() -> None:
    cache = CacheManager(CachePool(P18, 3))
    cache.hold(A, 4)
    assert cache.pool.free_chunks == 1
    cache.hold(B, 8)
    assert cache.pool.free_chunks == 1
    chunks = {block // 4 for owner in (A, B) for block in cache.tables(owner)[0]}
    assert len(chunks) == 1


def test_p20_a_chunk_that_is_wholly_free_may_change_its_group() -> None:
    cache = CacheManager(CachePool(T1, 3))
    assert not cache.can_hold(A, 9 * 4), "9 full blocks would leave no chunk for the ring"
    cache.allocators[0].take(9)
    assert not cache.can_hold(B, 8)
    cache.allocators[0].give_back(range(6, 15), keep=False)
    cache.recycle()
    cache.hold(B, 8)
    assert [len(table) for table in cache.tables(B)] == [2, 2]
    assert cache.pool.free_chunks == 0


def test_a_chunk_with_one_used_block_stays_with_its_group() -> None:
    cache = CacheManager(CachePool(T1, 3))
    blocks = cache.allocators[0].take(9)
    used = [blocks[0], blocks[3], blocks[6]]
    cache.allocators[0].give_back([block for block in blocks if block not in used], keep=False)
    cache.recycle()
    assert cache.pool.free_chunks == 0
    assert not cache.can_hold(B, 4), "bytes are free, but no chunk is"


def test_the_longest_request_is_known_beforehand() -> None:
    assert full_geometry(T0).max_tokens(8) == 32
    assert T1.max_tokens(3) == 12, "two chunks for the ring, one of three full blocks"
    sliding = CacheGeometry(8, 1, 8, "float32", (LayerGroup(AttentionType.SLIDING, (0, 1), window=3),))
    assert sliding.max_tokens(1) == UNBOUNDED
