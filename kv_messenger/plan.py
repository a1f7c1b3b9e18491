"""The transfer plan: two layouts, a prompt length and a ticket in; page writes and expected counts out. Pure.

    tokens      0 . . . . . . . . . . . . . . . . . . 22        pages of 8 tokens on both sides, 23 tokens to move
    pages       |------ 0 ------|------ 1 ------|---- 2 ---|
    chunks      [ 0 .. 9 ]            sends page 0 (1 will still change)
                          [ 10 .. 19 ]      sends page 1
                                      [ 20 .. 22 ]  sends page 2: the prompt ends

Pages of one size: one write per rank pair, page and layer, the pair's heads being one run of bytes on both sides.
Unequal pages: one write per head, part and run of tokens. Nothing is merged over the border of a destination page, and
nothing counts but the two layouts and the prompt's length: so both sides expect the same number of writes. The context
is one more for each part that the target wants of it.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from fabric.api import MemoryRegion, PageWrites, RemoteRegion
from kv_messenger.context import refuse_slot
from kv_messenger.regions import as_remote
from kv_messenger.runs import Run, RunCursor, count_runs, runs
from kv_messenger.sharding import RankPair, assign_sets, rank_pairs
from protocol.context import NO_CONTEXT
from protocol.layout import KVLayout
from protocol.ticket import TransferTicket

BUSY_PAGE_BYTES = 16 << 10
"""Below it a NIC spends more of its time on starting writes than on bytes."""


def page_advice(layout: KVLayout) -> str | None:
    """What to change about the size of pages, or None."""
    if layout.page_bytes >= BUSY_PAGE_BYTES:
        return None
    return f"a page is {layout.page_bytes} bytes, each is one write: raise --page-size until it is {BUSY_PAGE_BYTES}"


def pages_to_move(target: KVLayout, group: int, tokens: int, first_page: int) -> int:
    """Pages per layer that must cross for the first `tokens` tokens, less the `first_page` that the target holds."""
    return max(0, target.pages_for(group, tokens) - first_page)


class Expected(NamedTuple):
    """What all ranks of the decode side will count together."""

    writes: int
    bytes: int


def expected(source: KVLayout, target: KVLayout, tokens: int, first_page: int) -> Expected:
    """For the first `tokens` tokens, less the `first_page` pages of the target that are there already, and the context
    of the last of them."""
    pairs = rank_pairs(source, target, [0] * target.replica_sets)
    heads = sum(len(pair.heads) for pair in pairs)
    writes = size = 0
    for group in target.groups:
        count = count_runs(group, source.page_size, target.page_size, tokens, first_page) * len(group.layers)
        if source.page_size == target.page_size:
            writes += count * len(pairs)
            size += count * heads * target.head_bytes
        else:
            slots = max(0, group.slots(tokens) - first_page * target.page_size)
            writes += count * heads * target.parts
            size += slots * len(group.layers) * heads * target.parts * target.token_bytes
    context = target.context if tokens else NO_CONTEXT
    return Expected(writes + len(context.parts), size + context.slot_bytes)


class LayerWrites(NamedTuple):
    """`layer`: the model's."""

    layer: int
    writes: PageWrites


class _Route(NamedTuple):
    """A rank pair's number of heads, its two pools, and where those heads begin in a page of either."""

    heads: int
    source: MemoryRegion
    source_offset: int
    target: RemoteRegion
    target_offset: int


class _Pattern(NamedTuple):
    """Where the writes of a chunk begin in any layer and head, in units of the strides; `length` in bytes."""

    sources: Sequence[int]
    source_stride: int
    targets: Sequence[int]
    target_stride: int
    length: int


@dataclass(frozen=True)
class TransferPlan:
    """One ticket, ready to be turned into writes. `regions`: the pools of the source's ranks. `tokens`: how many must
    arrive. `context`: the source's slots, if its layout has any. Both layouts fit each other (`refuse_pair`)."""

    source: KVLayout
    regions: Sequence[MemoryRegion]
    target: KVLayout
    ticket: TransferTicket
    tokens: int
    context: MemoryRegion | None = None

    @cached_property
    def assigned(self) -> list[int]:
        """The source's replica set for each of the target's."""
        return assign_sets(self.source, self.target, f"{self.ticket.key}@{self.ticket.key.instance}")

    @cached_property
    def _routes(self) -> list[_Route]:
        return [self._route(pair) for pair in rank_pairs(self.source, self.target, self.assigned)]

    def _route(self, pair: RankPair) -> _Route:
        to = self.ticket.regions[pair.target]
        return _Route(
            heads=len(pair.heads),
            source=self.regions[pair.source],
            source_offset=_bytes_before(self.source, pair.source, pair.heads),
            target=as_remote(to),
            target_offset=_bytes_before(self.target, pair.target, pair.heads),
        )

    def refusal(self) -> str | None:
        """Why the ticket does not fit the request or the target's layout, or None."""
        ticket, target = self.ticket, self.target
        if len(ticket.regions) != target.tensor_parallel:
            return f"ticket for {len(ticket.regions)} ranks, its node has {target.tensor_parallel}"
        if len(ticket.blocks) != len(target.groups):
            return f"ticket with {len(ticket.blocks)} block tables, the model has {len(target.groups)}"
        if ticket.first_page and not target.is_full:
            return "ticket leaves pages out, but only layers of full attention can hold them already"
        reasons = (self._table_refusal(group, blocks) for group, blocks in enumerate(ticket.blocks))
        return next(filter(None, reasons), None) or refuse_slot(target.context, ticket.context)

    def _table_refusal(self, group: int, blocks: Sequence[int]) -> str | None:
        pages = pages_to_move(self.target, group, self.tokens, self.ticket.first_page)
        if pages == 0 or len(blocks) != pages:
            return f"ticket lists {len(blocks)} blocks, {self.tokens} tokens need {pages}"
        for region in self.ticket.regions:
            if (max(blocks) + 1) * self.target.block_bytes(group) > region.length:
                return f"block {max(blocks)} lies outside the registered pool of {region.length} bytes"
            if region.base + region.length >= 1 << 64:
                return f"the pool at {region.base:#x} does not fit into an address space"
        return None

    def cursors(self) -> list[RunCursor]:
        """One for each group."""
        sizes = self.source.page_size, self.target.page_size
        first = self.ticket.first_page
        return [RunCursor(runs(group, *sizes, self.tokens, first)) for group in self.target.groups]

    def writes(self, taken: Sequence[Sequence[Run]], tables: Sequence[Sequence[int]]) -> list[LayerWrites]:
        """The writes of these runs, by group, in every layer of their group, ascending. `tables`: the source's whole
        block tables."""
        listed = [w for g, of_group in enumerate(taken) if of_group for w in self._writes(g, of_group, tables[g])]
        return sorted(listed, key=itemgetter(0))

    def context_writes(self, slot: int) -> list[PageWrites]:
        """From this slot of the source, one for each part that the target wants."""
        source, target, to = self.source.context, self.target.context, self.ticket.context
        if to is None:
            return []
        assert self.context is not None, "a pair whose context fits has slots on both sides"
        return [
            PageWrites(
                source=self.context,
                source_indices=[slot],
                source_stride=source.slot_bytes,
                source_offset=source.offset(part.name),
                target=as_remote(to.region),
                target_indices=[to.slot],
                target_stride=target.slot_bytes,
                target_offset=target.offset(part.name),
                length=part.bytes,
                immediate=self.ticket.immediate,
            )
            for part in target.parts
        ]

    def _writes(self, group: int, taken: Sequence[Run], table: Sequence[int]) -> Iterator[LayerWrites]:
        """What the layers have in common is computed once: only their offsets differ."""
        widths = {route.heads for route in self._routes}
        patterns = {heads: self._patterns(group, taken, table, heads) for heads in widths}
        common = [(route, pattern) for route in self._routes for pattern in patterns[route.heads]]
        steps = self.source.page_bytes, self.target.page_bytes
        for ordinal, layer in enumerate(self.target.groups[group].layers):
            for route, pattern in common:
                writes = PageWrites(
                    source=route.source,
                    source_indices=pattern.sources,
                    source_stride=pattern.source_stride,
                    source_offset=route.source_offset + ordinal * steps[0],
                    target=route.target,
                    target_indices=pattern.targets,
                    target_stride=pattern.target_stride,
                    target_offset=route.target_offset + ordinal * steps[1],
                    length=pattern.length,
                    immediate=self.ticket.immediate,
                )
                yield LayerWrites(layer, writes)

    def _patterns(self, group: int, taken: Sequence[Run], table: Sequence[int], heads: int) -> list[_Pattern]:
        source, target, first = self.source, self.target, self.ticket.first_page
        blocks = self.ticket.blocks[group]
        strides = source.block_bytes(group), target.block_bytes(group)
        if source.page_size == target.page_size:
            from_blocks = array("Q", [table[run.source_page] for run in taken])
            to_blocks = array("Q", [blocks[run.target_page - first] for run in taken])
            return [_Pattern(from_blocks, strides[0], to_blocks, strides[1], heads * target.head_bytes)]
        patterns = []
        for length in sorted({run.length for run in taken}):
            cut = [run for run in taken if run.length == length]
            starts = [table[r.source_page] * strides[0] + r.source_slot * source.token_bytes for r in cut]
            ends = [blocks[r.target_page - first] * strides[1] + r.target_slot * target.token_bytes for r in cut]
            froms, tos = _each_part(starts, source, heads), _each_part(ends, target, heads)
            patterns.append(_Pattern(froms, 1, tos, 1, length * target.token_bytes))
        return patterns


def _bytes_before(layout: KVLayout, rank: int, heads: range) -> int:
    """In a page of `rank`, before the first of `heads`."""
    return (heads.start - layout.heads_of(rank).start) * layout.head_bytes


def _each_part(starts: Sequence[int], layout: KVLayout, heads: int) -> Sequence[int]:
    """The byte of each part of `heads` heads, for tokens whose first head's first part is at `starts`."""
    part_bytes = layout.page_size * layout.token_bytes
    steps = [index * part_bytes for index in range(heads * layout.parts)]
    return array("Q", [start + step for start in starts for step in steps])
