"""A brute-force model of what a transfer must do: it knows how a layout places each element, and nothing of the plan.

Pools are numpy arrays of 32-bit elements (`head_dim` 1), so that an element is one part of one head of one token. The
source's are filled as a prefill engine fills them, chunk by chunk, with a number that names layer, head, part, token
and rank; the plan's writes are carried out by the formula of `PageWrites`, and every element of every target pool is
then accounted for.
"""

import random
from dataclasses import dataclass, field

import numpy as np

from fabric.api import PageWrites
from kv_messenger.plan import TransferPlan
from kv_messenger.sender_transfer import Arm, Chunk, SenderTransfer
from protocol.layout import KVLayout
from protocol.ticket import RankRegion, TransferKey, TransferTicket
from tests.kv_messenger.builders import IMMEDIATE, region

ITEM = 4
SPARE = 3
"""Blocks of each group that nobody holds."""


def holders(heads: int, ranks: int, head: int) -> list[int]:
    """The ranks that hold a head, one for each replica set."""
    if heads % ranks == 0:
        return [head // (heads // ranks)]
    copies = ranks // heads
    return list(range(head * copies, (head + 1) * copies))


def first_head(heads: int, ranks: int, rank: int) -> int:
    return rank * (heads // ranks) if heads % ranks == 0 else rank // (ranks // heads)


def element(of: KVLayout, layer: int, head: int, part: int, positions: np.ndarray, rank: int) -> np.ndarray:
    """Its name, never 0."""
    kind = (layer * of.kv_heads + head) * of.parts + part
    return ((rank * 256 + kind) * 1024 + positions + 1).astype(np.uint32)


@dataclass
class Side:
    """One engine's pools, `[ranks, elements]`, and one request's block tables, drawn at random."""

    layout: KVLayout
    pages: list[int]
    rng: random.Random
    tables: list[list[int]] = field(init=False)
    pools: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        blocks = [pages + SPARE for pages in self.pages]
        self.tables = [self.rng.sample(range(n), n)[:pages] for n, pages in zip(blocks, self.pages, strict=True)]
        # Groups share a pool: the second's blocks lie behind the first's, whatever their sizes.
        sizes = [len(group.layers) * self.page_elements for group in self.layout.groups]
        at = 0
        for index, size in enumerate(sizes):
            skipped = -(-at // size)
            self.tables[index] = [block + skipped for block in self.tables[index]]
            at = (skipped + blocks[index]) * size
        self.pools = np.zeros((self.layout.tensor_parallel, at), dtype=np.uint32)

    @property
    def rank_heads(self) -> int:
        return max(1, self.layout.kv_heads // self.layout.tensor_parallel)

    @property
    def page_elements(self) -> int:
        return self.rank_heads * self.layout.parts * self.layout.page_size

    @property
    def rank_bytes(self) -> int:
        return int(self.pools.shape[1]) * ITEM

    def at(self, group: int, ordinal: int, rank: int, head: int, part: int, slots: np.ndarray) -> np.ndarray:
        """Indices into the rank's pool. `slots`: of the request, from its first page on."""
        of, size = self.layout, self.layout.page_size
        block = np.array(self.tables[group], dtype=np.int64)[slots // size]
        page = block * len(of.groups[group].layers) + ordinal
        within = head - first_head(of.kv_heads, of.tensor_parallel, rank)
        where: np.ndarray = ((page * self.rank_heads + within) * of.parts + part) * size + slots % size
        return where

    def compute(self, start: int, end: int) -> None:
        """A forward: tokens [start, end) into the pages of every rank that holds their heads."""
        of = self.layout
        for group, layers in enumerate(of.groups):
            positions = np.arange(max(start, end - (layers.window or end)), end)
            slots = positions if layers.window is None else positions % layers.window
            for ordinal, layer in enumerate(layers.layers):
                for head in range(of.kv_heads):
                    for rank in holders(of.kv_heads, of.tensor_parallel, head):
                        for part in range(of.parts):
                            where = self.at(group, ordinal, rank, head, part, slots)
                            self.pools[rank, where] = element(of, layer, head, part, positions, rank)


@dataclass
class Transfer:
    """One prompt's KV, from a source of one layout to a target of another."""

    source_layout: KVLayout
    target_layout: KVLayout
    tokens: int
    first_page: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        rng, tokens, groups = random.Random(self.seed), self.tokens, range(len(self.source_layout.groups))
        source, target = self.source_layout, self.target_layout
        self.source = Side(source, [source.pages_for(group, tokens) for group in groups], rng)
        self.target = Side(target, [target.pages_for(group, tokens) for group in groups], rng)
        self.written = np.zeros(self.target.pools.shape, dtype=np.int64)
        self.count = self.moved = 0
        regions = [
            RankRegion(keys=[(0, r)], base=0, length=self.target.rank_bytes) for r in range(target.tensor_parallel)
        ]
        ticket = TransferTicket(
            key=TransferKey(f"request {self.seed}", 1, "decode-instance"),
            landing=1,
            first_page=self.first_page,
            immediate=IMMEDIATE,
            blocks=[table[self.first_page :] for table in self.target.tables],
            regions=regions,
        )
        ours = [region(r, self.source.rank_bytes) for r in range(source.tensor_parallel)]
        self.plan = TransferPlan(source, ours, target, ticket, tokens)

    def run(self, chunks: list[tuple[int, int]]) -> None:
        """As the prefill node would: what is there already goes at once, what a forward makes goes after it."""
        assert self.plan.refusal() is None
        transfer = SenderTransfer(self.plan.ticket.key, self.plan, 0, 0.0)
        self.source.compute(0, chunks[0][0])
        for start, end in chunks:
            arms = [a for a in transfer.on_chunk(Chunk(start, end, self.source.tables, 1)) if isinstance(a, Arm)]
            assert [arm.layer for arm in arms if arm.threshold] == sorted(a.layer for a in arms if a.threshold)
            self._apply([arm for arm in arms if arm.threshold is None])
            self.source.compute(start, end)
            self._apply([arm for arm in arms if arm.threshold == 1 + arm.layer])
            assert all(arm.threshold in (None, 1 + arm.layer) for arm in arms)

    def _apply(self, arms: list[Arm]) -> None:
        for arm in arms:
            self._carry_out(arm.writes)

    def _carry_out(self, writes: PageWrites) -> None:
        assert writes.immediate == IMMEDIATE and not writes.length % ITEM
        span = np.arange(writes.length // ITEM)
        sources = np.array(writes.source_indices, dtype=np.int64) * writes.source_stride + writes.source_offset
        targets = np.array(writes.target_indices, dtype=np.int64) * writes.target_stride + writes.target_offset
        assert not (sources % ITEM).any() and not (targets % ITEM).any()
        assert sources.max() + writes.length <= writes.source.length
        assert targets.max() + writes.length <= writes.target.length
        froms, tos = sources[:, None] // ITEM + span, targets[:, None] // ITEM + span
        self.target.pools[writes.target.keys[0].key][tos] = self.source.pools[writes.source.id][froms]
        np.add.at(self.written[writes.target.keys[0].key], tos, 1)
        self.count += len(sources)
        self.moved += len(sources) * writes.length

    def check(self) -> None:
        """Every element of the prompt on every rank that holds it, once, from the assigned source; nothing else."""
        of, source = self.target_layout, self.source_layout
        copies = max(1, of.tensor_parallel // of.kv_heads)
        for group, layers in enumerate(of.groups):
            slots, positions = self._arrived(layers.window)
            for ordinal, layer in enumerate(layers.layers):
                for head in range(of.kv_heads):
                    by = holders(source.kv_heads, source.tensor_parallel, head)
                    for replica_set, rank in enumerate(holders(of.kv_heads, of.tensor_parallel, head)):
                        assert len(self.plan.assigned) == copies
                        sender = by[self.plan.assigned[replica_set]]
                        for part in range(of.parts):
                            where = self.target.at(group, ordinal, rank, head, part, slots)
                            expected = element(of, layer, head, part, positions, sender)
                            assert np.array_equal(self.target.pools[rank, where], expected), (layer, head, part, rank)
                            assert (self.written[rank, where] == 1).all()
                            self.written[rank, where] = 0
                            self._forgive_slack(group, ordinal, rank, head, part)
        assert not self.written.any(), "something else was written to"

    def _arrived(self, window: int | None) -> tuple[np.ndarray, np.ndarray]:
        """The slots that must cross, and the position that each of them holds at the end of the prompt."""
        if window is None:
            slots = np.arange(self.first_page * self.target_layout.page_size, self.tokens)
            return slots, slots
        positions = np.arange(max(0, self.tokens - window), self.tokens)
        return positions % window, positions

    def _forgive_slack(self, group: int, ordinal: int, rank: int, head: int, part: int) -> None:
        """A page written whole has room behind the prompt's last token; where sizes differ nothing is written there."""
        of = self.target_layout
        if of.page_size != self.source_layout.page_size:
            return
        slots = np.arange(of.groups[group].slots(self.tokens), of.pages_for(group, self.tokens) * of.page_size)
        where = self.target.at(group, ordinal, rank, head, part, slots)
        assert (self.written[rank, where] <= 1).all()
        self.written[rank, where] = 0
