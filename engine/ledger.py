"""The page ledger: every block of a pool, who has it, since when. For people, and for the check that none is lost."""

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from engine.allocators import CacheAllocator, FullAttentionCacheAllocator
from engine.cache_manager import CacheManager


class BlockState(Enum):
    """What a block is; exactly one at a time, and all together are the pool."""

    FREE = "free"
    CACHED = "cached"
    """Initialised: nobody uses it, a prefix may be hit there, and it is taken when room is needed."""
    HELD = "held"
    QUARANTINED = "quarantined"
    LEAVING = "leaving"


@dataclass(frozen=True)
class BlockRecord:
    """One use of one block. A free or cached one has no owner and no age; a shared one has a record for each user."""

    block: int
    state: BlockState
    owner: str = ""
    generation: int = 0
    age_s: float = 0.0


def ledger(cache: CacheManager, group: int = 0) -> list[BlockRecord]:
    """By block, of one layer group. Any thread may ask; while the engine runs, a block on the move may show twice or
    not at all."""
    allocator, now = cache.allocators[group], cache.now()
    records = [BlockRecord(block, BlockState.FREE) for block in allocator.free_list()]
    for chunk in cache.pool.free_list():
        records += [BlockRecord(block, BlockState.FREE) for block in _blocks_of(allocator, chunk)]
    records += [BlockRecord(block, BlockState.CACHED) for block in _cached(allocator)]
    for holding in cache.holdings():
        id_, attempt = holding.owner
        state, age = BlockState(holding.state.value), now - holding.since
        records += [BlockRecord(block, state, id_, attempt, age) for block in list(holding.tables[group])]
    return sorted(records, key=lambda record: record.block)


def check(cache: CacheManager) -> None:
    """Assert that each chunk has one home, each block and context slot one state, and that references count users."""
    reserved, pool = cache.pool.reserved, cache.pool
    homes = pool.free_list() + [chunk for allocator in cache.allocators for chunk in allocator.chunks()]
    assert sorted(homes) == list(range(reserved, reserved + pool.num_chunks)), f"chunks without one home: {homes}"
    for group in range(len(cache.allocators)):
        _check_group(cache, group)
    if cache.contexts:
        slots = cache.contexts.free_list() + [h.slot for h in cache.holdings() if h.slot is not None]
        assert sorted(slots) == list(range(cache.contexts.count)), f"context slots without one home: {slots}"


def _check_group(cache: CacheManager, group: int) -> None:
    allocator = cache.allocators[group]
    used = Counter(block for holding in cache.holdings() for block in holding.tables[group])
    idle = allocator.free_list() + _cached(allocator)
    ours = [block for chunk in allocator.chunks() for block in _blocks_of(allocator, chunk)]
    assert sorted([*used, *idle]) == sorted(ours), f"blocks of group {group} are not each in one place"
    users = cache.prefix.users() if cache.prefix else {}
    for block, count in used.items():
        assert count == users.get(block, 1), f"block {block} has {count} users, {users.get(block)} references"
    for holding in cache.holdings():
        held, room = len(holding.tables[group]), allocator.capacity(len(holding.tables[group]))
        assert held == 0 or holding.state is not holding.state.HELD or holding.capacity <= room


def _blocks_of(allocator: CacheAllocator, chunk: int) -> range:
    return range(chunk * allocator.blocks_per_chunk, (chunk + 1) * allocator.blocks_per_chunk)


def _cached(allocator: CacheAllocator) -> list[int]:
    if isinstance(allocator, FullAttentionCacheAllocator) and allocator.prefix:
        return allocator.prefix.initialised_blocks()
    return []
