"""Which block belongs to whom. Questions in pairs with actions: the scheduler decides, the allocator acts."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from engine.cache_pool import CachePool
from engine.request import Owner


class BlockState(Enum):
    """What a block is; exactly one at a time, and all together are the pool. (Cached blocks will be a fourth.)"""

    FREE = "free"
    HELD = "held"
    QUARANTINED = "quarantined"
    """Nobody here uses it, but a peer may still write to it."""


@dataclass
class Holding:
    """The block table of one owner, in token order. `since`: when its state began, on the allocator's clock."""

    owner: Owner
    state: BlockState
    blocks: list[int]
    since: float


@dataclass(frozen=True)
class BlockRecord:
    """One block, for people. A free one has no owner and no age."""

    block: int
    state: BlockState
    owner: str = ""
    generation: int = 0
    age_s: float = 0.0


class FullAttentionCacheAllocator:
    """Blocks for layers that attend to everything: a request's table grows by one block per `page_size` tokens."""

    def __init__(self, pool: CachePool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._holdings: dict[Owner, Holding] = {}
        self.total = pool.num_chunks

    @property
    def free(self) -> int:
        return self._pool.free_chunks

    @property
    def quarantined(self) -> int:
        return sum(len(h.blocks) for h in list(self._holdings.values()) if h.state is BlockState.QUARANTINED)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._pool.geometry.page_size)

    def blocks(self, owner: Owner) -> Sequence[int]:
        """The owner's table, or nothing."""
        holding = self._holdings.get(owner)
        return holding.blocks if holding else ()

    def missing(self, owner: Owner, tokens: int) -> int:
        """Blocks that the owner lacks to hold `tokens` tokens."""
        return max(0, self.blocks_for(tokens) - len(self.blocks(owner)))

    def can_grow(self, owner: Owner, tokens: int) -> bool:
        return self.missing(owner, tokens) <= self.free

    def grow(self, owner: Owner, tokens: int) -> None:
        """Take the blocks that are missing, all of them: ask `can_grow` first."""
        missing = self.missing(owner, tokens)
        if not missing:
            return
        holding = self._holdings.get(owner)
        if holding is None:
            holding = self._holdings[owner] = Holding(owner, BlockState.HELD, [], self._clock())
        assert holding.state is BlockState.HELD, f"{owner} is in quarantine"
        blocks = [self._pool.take() for _ in range(missing)]
        self._pool.check_poison(0, blocks)
        holding.blocks.extend(blocks)

    def release(self, owner: Owner) -> None:
        """Free all that the owner holds, in whatever state. Unknown owners are ignored."""
        holding = self._holdings.pop(owner, None)
        if holding:
            self._pool.poison(0, holding.blocks)
            for block in reversed(holding.blocks):
                self._pool.give_back(block)

    def quarantine(self, owner: Owner) -> None:
        """Out of use, but not free: until `release`, which must follow proof that no peer can write there."""
        holding = self._holdings.get(owner)
        if holding and holding.state is BlockState.HELD:
            holding.state, holding.since = BlockState.QUARANTINED, self._clock()

    def is_quarantined(self, owner: Owner) -> bool:
        holding = self._holdings.get(owner)
        return holding is not None and holding.state is BlockState.QUARANTINED

    def holders(self) -> list[Owner]:
        """Owners of held blocks, not of those in quarantine."""
        return [h.owner for h in self._holdings.values() if h.state is BlockState.HELD]

    def ledger(self) -> list[BlockRecord]:
        """By block. Any thread may ask; while the engine runs, a block on the move may show twice or not at all."""
        now = self._clock()
        records = [BlockRecord(block, BlockState.FREE) for block in self._pool.free_list()]
        for h in list(self._holdings.values()):
            id_, attempt = h.owner
            records += [BlockRecord(block, h.state, id_, attempt, now - h.since) for block in list(h.blocks)]
        return sorted(records, key=lambda record: record.block)

    def check(self) -> None:
        """Each block is exactly one of free, held and quarantined."""
        counted = [record.block for record in self.ledger()]
        assert counted == list(range(2, 2 + self.total)), f"blocks are not each in one place: {counted}"
