"""Which block belongs to whom, over all layer groups. Questions in pairs with actions: others decide, this acts.

owner --- Holding --- one block table per group --- allocator of the group --- pool of chunks
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from engine.allocators import CacheAllocator, FullAttentionCacheAllocator, SlidingAttentionCacheAllocator
from engine.cache_pool import CachePool
from engine.contexts import ContextSlots, split
from engine.prefix_cache import PrefixCache
from engine.request import Owner, Request


class HoldingState(Enum):
    HELD = "held"
    QUARANTINED = "quarantined"
    """Nobody here uses its blocks, but a peer may still write to them."""
    LEAVING = "leaving"
    """Its request is gone, but a forward under way still writes to its blocks."""


@dataclass(eq=False)
class Holding:
    """The block tables of one owner, in token order, one per group. `capacity`: tokens that they hold. `shared`:
    leading blocks that were there before. `registered`: leading blocks whose content was registered, or was found to
    be somebody else's. `since`: when its state began, on the manager's clock. `keep`: of one that leaves, whether its
    full blocks stay for later hits. `slot`: for the context that goes with the blocks."""

    owner: Owner
    tables: list[list[int]]
    since: float
    state: HoldingState = HoldingState.HELD
    capacity: int = 0
    shared: int = 0
    registered: int = 0
    keep: bool = True
    slot: int | None = None


class BlockMove(NamedTuple):
    """Blocks of one group whose bytes are to be copied, pairwise."""

    group: int
    sources: list[int]
    targets: list[int]


class CacheManager:
    """Owns all block tables of a pool, and the slots of contexts where there are any. All-or-nothing: what does not fit
    in every group takes nothing from any."""

    def __init__(
        self,
        pool: CachePool,
        prefix: PrefixCache | None = None,
        clock: Callable[[], float] = time.monotonic,
        contexts: ContextSlots | None = None,
    ) -> None:
        assert prefix is None or pool.geometry.is_full, "only blocks of full attention can be shared"
        self.pool = pool
        self.prefix = prefix
        self.contexts = contexts
        self.allocators = _allocators(pool, prefix)
        self._clock = clock
        self._holdings: dict[Owner, Holding] = {}
        self._leaving: list[Holding] = []
        self._no_tables: list[list[int]] = [[] for _ in self.allocators]

    # ---- how much there is ----

    @property
    def total(self) -> int:
        """In blocks of the whole model."""
        return self.pool.geometry.whole_blocks(self.pool.num_chunks)

    @property
    def free(self) -> int:
        """In blocks of the whole model: free and initialised ones."""
        return self._free_bytes // sum(self.pool.geometry.block_bytes)

    @property
    def free_fraction(self) -> float:
        return self._free_bytes / (self.pool.num_chunks * self.pool.geometry.chunk_bytes)

    @property
    def quarantined(self) -> int:
        """In blocks of the whole model, rounded up."""
        sizes = self.pool.geometry.block_bytes
        kept = [h.tables for h in list(self._holdings.values()) if h.state is HoldingState.QUARANTINED]
        held = sum(len(table) * size for tables in kept for table, size in zip(tables, sizes, strict=True))
        return -(-held // sum(sizes))

    @property
    def _free_bytes(self) -> int:
        free = self.pool.free_chunks * self.pool.geometry.chunk_bytes
        for allocator, size in zip(self.allocators, self.pool.geometry.block_bytes, strict=True):
            free += (allocator.free + allocator.evictable) * size
        return free

    # ---- tables ----

    def tables(self, owner: Owner) -> list[list[int]]:
        """The owner's live tables, or empty ones."""
        holding = self._holdings.get(owner)
        return holding.tables if holding else [[] for _ in self.allocators]

    def holds(self, owner: Owner) -> bool:
        return owner in self._holdings

    def sole_blocks(self, owner: Owner) -> list[int]:
        """How many blocks nobody else uses, by group: those that would come free."""
        counts = [len(table) for table in self.tables(owner)]
        if self.prefix is not None:
            counts[0] = sum(self.prefix.users_of(block) <= 1 for block in self.tables(owner)[0])
        return counts

    def missing_blocks(self, owner: Owner, tokens: int) -> list[int]:
        """How many the owner lacks to hold `tokens` tokens, by group."""
        return self._missing(self.tables(owner), tokens)

    def can_hold(self, owner: Owner, tokens: int, hits: Sequence[int] = (), context: bool = False) -> bool:
        """Whether the owner's tables can be made to hold `tokens` tokens. `hits`: initialised or used blocks that it
        would begin with, and that are then not there to be evicted. `context`: a slot is wanted too."""
        holding = self._holdings.get(owner)
        if holding is not None and tokens <= holding.capacity:
            return True
        if context and not self._can_have_slot(holding):
            return False
        missing = self._missing(holding.tables if holding else self._no_tables, tokens)
        if hits:
            assert self.prefix is not None
            missing[0] -= len(hits)
            return self._fit(missing, kept=self.prefix.count_initialised(hits))
        return self._fit(missing)

    def hold(self, owner: Owner, tokens: int, hits: Sequence[int] = (), context: bool = False) -> Holding:
        """Ask `can_hold` first. With `hits` the owner must hold nothing yet."""
        holding = self._holdings.get(owner)
        if holding is None:
            holding = self._holdings[owner] = Holding(owner, [[] for _ in self.allocators], self._clock())
        if tokens <= holding.capacity:
            return holding
        assert holding.state is HoldingState.HELD, f"{owner} is {holding.state.value}"
        if hits:
            self._attach(holding, hits)
        missing = self._missing(holding.tables, tokens)
        for allocator, table, count in zip(self.allocators, holding.tables, missing, strict=True):
            if count:
                table.extend(allocator.take(count))
        self._set_capacity(holding)
        if context and holding.slot is None:
            assert self.contexts is not None
            holding.slot = self.contexts.take()
        return holding

    def would_fit(self, given: Sequence[int], wanted: Sequence[int]) -> bool:
        """Whether `wanted` blocks would be there once `given` ones came free, both by group. Hopeful: blocks given back
        are counted as whole chunks as far as their number goes."""
        chunks = self.pool.free_chunks
        for allocator, came, want in zip(self.allocators, given, wanted, strict=True):
            spare = allocator.free + allocator.evictable + came - want
            chunks += min(spare, came) // allocator.blocks_per_chunk if spare > 0 else 0
            chunks -= -(spare // allocator.blocks_per_chunk) if spare < 0 else 0
        return chunks >= 0

    def recycle(self) -> None:
        """Let wholly free chunks change their group. With one group there is nothing to change to."""
        if len(self.allocators) > 1:
            for allocator in self.allocators:
                allocator.recycle()

    # ---- contexts ----

    def wants_context(self, request: Request) -> bool:
        """Whether a context is kept here, the request's prompt has one, and it is not there yet."""
        return self.contexts is not None and request.context is None and request.context_position >= 0

    def slot(self, owner: Owner) -> int | None:
        holding = self._holdings.get(owner)
        return holding.slot if holding else None

    def keep_context(self, request: Request, values: torch.Tensor) -> None:
        """That a forward has computed: of a prefill-only request in the slot that goes with its blocks."""
        assert self.contexts is not None
        if request.prefill_only:
            slot = self.slot(request.owner)
            assert slot is not None, "taken at admission, kept until its release"
            self.contexts.write(slot, values)
        else:
            request.context = split(self.contexts.layout, values)

    def receive_context(self, request: Request, arrived: bool) -> None:
        """The request takes over what is in its slot, if anything has `arrived` there, and the slot comes free: nobody
        may write there any more."""
        holding = self._holdings[request.owner]
        if holding.slot is not None:
            assert self.contexts is not None
            request.context = self.contexts.read(holding.slot) if arrived else None
            self._give_back_slot(holding)

    # ---- sharing ----

    def register(self, owner: Owner, hashes: Sequence[bytes], may_replace: bool) -> Holding | None:
        """The first `len(hashes)` blocks of the owner are complete and hash so. If `may_replace`, then where the
        content was known already the known block takes the place of the owner's. Returns the blocks that were
        replaced, if any: for `give_back`, once no forward uses them."""
        prefix, holding = self.prefix, self._holdings.get(owner)
        if prefix is None or holding is None or holding.state is not HoldingState.HELD:
            return None
        table, first, complete = holding.tables[0], holding.registered, len(hashes)
        if complete <= first:
            return None
        holding.registered, own = complete, table[first:complete]
        kept = prefix.register(own, hashes[first:complete], may_replace)
        if kept == own:
            return None
        table[first:complete] = kept
        replaced = [block for block, other in zip(own, kept, strict=True) if block != other]
        return self._leaving_with(owner, [replaced], keep=False)

    def can_fork(self, parent: Owner) -> bool:
        return self._fit([len(table) - self._shareable(parent, group) for group, table in self._numbered(parent)])

    def fork(self, parent: Owner, child: Owner) -> list[BlockMove]:
        """The child begins with what the parent holds: registered blocks by reference, the others as new blocks whose
        bytes the caller copies. Ask `can_fork` first."""
        holding = Holding(child, [], self._clock(), registered=self._holdings[parent].registered)
        moves = []
        for group, table in self._numbered(parent):
            shared = table[: self._shareable(parent, group)]
            if self.prefix is not None:
                self.prefix.pin(shared)
            copies = self.allocators[group].take(len(table) - len(shared))
            holding.tables.append([*shared, *copies])
            moves.append(BlockMove(group, table[len(shared) :], copies))
        self._holdings[child] = holding
        self._set_capacity(holding)
        return moves

    # ---- letting go ----

    def release(self, owner: Owner, keep: bool = True) -> None:
        """Free all that the owner holds, in whatever state. `keep`: full blocks stay for later hits. Unknown owners
        are ignored."""
        holding = self._holdings.pop(owner, None)
        if holding:
            self._give_back(holding, keep)

    def leave(self, owner: Owner, keep: bool = True) -> Holding | None:
        """The owner's id may come back at once, its blocks are free after `give_back`, once no forward uses them."""
        holding = self._holdings.pop(owner, None)
        if holding is None:
            return None
        leaving = self._leaving_with(owner, holding.tables, keep)
        leaving.slot = holding.slot
        return leaving

    def give_back(self, holding: Holding) -> None:
        """Free what `leave` or `register` returned."""
        self._leaving.remove(holding)
        self._give_back(holding, holding.keep)

    def quarantine(self, owner: Owner) -> None:
        """Out of use, but not free: until `release`, which must follow proof that no peer can write there. Blocks that
        were shared were never a peer's to write."""
        holding = self._holdings.get(owner)
        if holding is None or holding.state is not HoldingState.HELD:
            return
        shared, holding.tables[0] = holding.tables[0][: holding.shared], holding.tables[0][holding.shared :]
        self.allocators[0].give_back(shared, keep=True)
        holding.shared, holding.state, holding.since = 0, HoldingState.QUARANTINED, self._clock()

    def is_quarantined(self, owner: Owner) -> bool:
        holding = self._holdings.get(owner)
        return holding is not None and holding.state is HoldingState.QUARANTINED

    # ---- for the page ledger and for checks ----

    def holdings(self) -> list[Holding]:
        """Any thread may ask; a table on the move may show halfway."""
        return [*self._holdings.values(), *self._leaving]

    def now(self) -> float:
        return self._clock()

    # ---- inside ----

    def _missing(self, tables: Sequence[Sequence[int]], tokens: int) -> list[int]:
        missing = []
        for allocator, table in zip(self.allocators, tables, strict=True):
            count = allocator.blocks_for(tokens) - len(table)
            missing.append(count if count > 0 else 0)
        return missing

    def _fit(self, missing: Iterable[int], kept: int = 0) -> bool:
        """Blocks missing by group, rounded up to chunks where a group's own do not do. `kept`: evictable blocks that
        must stay."""
        chunks = 0
        for allocator, count in zip(self.allocators, missing, strict=True):
            short = count - allocator.free - allocator.evictable + kept
            if short > 0:
                chunks += -(-short // allocator.blocks_per_chunk)
        return chunks <= self.pool.free_chunks

    def _leaving_with(self, owner: Owner, tables: list[list[int]], keep: bool) -> Holding:
        holding = Holding(owner, tables, self._clock(), HoldingState.LEAVING, keep=keep)
        self._leaving.append(holding)
        return holding

    def _attach(self, holding: Holding, hits: Sequence[int]) -> None:
        assert self.prefix is not None and not holding.tables[0]
        self.prefix.pin(hits)
        holding.tables[0].extend(hits)
        holding.shared = holding.registered = len(hits)

    def _set_capacity(self, holding: Holding) -> None:
        pairs = zip(self.allocators, holding.tables, strict=True)
        holding.capacity = min(a.capacity(len(table)) for a, table in pairs)

    def _numbered(self, owner: Owner) -> Iterable[tuple[int, list[int]]]:
        return enumerate(self._holdings[owner].tables)

    def _shareable(self, owner: Owner, group: int) -> int:
        """Leading blocks that can be shared by reference: those that are registered and will not change."""
        return self._holdings[owner].registered if self.prefix is not None and group == 0 else 0

    def _give_back(self, holding: Holding, keep: bool) -> None:
        for allocator, table in zip(self.allocators, holding.tables, strict=True):
            allocator.give_back(table, keep)
        self._give_back_slot(holding)

    def _can_have_slot(self, holding: Holding | None) -> bool:
        assert self.contexts is not None
        return self.contexts.free > 0 or (holding is not None and holding.slot is not None)

    def _give_back_slot(self, holding: Holding) -> None:
        if holding.slot is not None:
            assert self.contexts is not None
            self.contexts.give_back(holding.slot)
            holding.slot = None


def _allocators(pool: CachePool, prefix: PrefixCache | None) -> list[CacheAllocator]:
    allocators: list[CacheAllocator] = []
    for index, group in enumerate(pool.geometry.groups):
        if group.window is None:
            allocators.append(FullAttentionCacheAllocator(pool, index, prefix))
        else:
            allocators.append(SlidingAttentionCacheAllocator(pool, index))
    return allocators
