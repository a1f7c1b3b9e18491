"""The transfer plan: two layouts, a prompt length and a ticket in; page writes and expected counts out. Pure.

Equal sharding: rank i of the prefill side writes whole pages to rank i of the decode side, one write per page and
layer. Unequal sharding adds further rank pairs with slices of a page; writes are merged only inside one destination
page, so both sides derive the same count from layouts and length alone.

    tokens      0 . . . . . . . . . . . . . . . . . . 22        page_size 8, 23 tokens to move
    pages       |------ 0 ------|------ 1 ------|---- 2 ---|
    chunks      [ 0 .. 9 ]            sends page 0 (1 will still change)
                          [ 10 .. 19 ]      sends page 1
                                      [ 20 .. 22 ]  sends page 2: the prompt ends
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fabric.api import MemoryRegion, PageWrites, RemoteRegion
from protocol.layout import KVLayout
from protocol.ticket import TransferTicket

BUSY_PAGE_BYTES = 16 << 10
"""Below it a NIC spends more of its time on starting writes than on bytes."""


def page_advice(layout: KVLayout) -> str | None:
    """What to change about the size of pages, or None."""
    if layout.page_bytes >= BUSY_PAGE_BYTES:
        return None
    return f"a page is {layout.page_bytes} bytes, each is one write: raise --page-size until it is {BUSY_PAGE_BYTES}"


def refuse_pair(source: KVLayout, target: KVLayout) -> str | None:
    """Why pages of `source` cannot be written into `target`, or None if they can."""
    if source != target:
        return f"unequal KV layouts are not supported: prefill side {source}, decode side {target}"
    return None


def pages_to_move(target: KVLayout, tokens: int, first_page: int) -> int:
    """Pages per layer that must cross for the first `tokens` tokens, less the `first_page` that the target holds."""
    return max(0, target.pages_for(tokens) - first_page)


def expected_writes(source: KVLayout, target: KVLayout, tokens: int, first_page: int) -> int:
    """Writes that one destination rank will count."""
    assert refuse_pair(source, target) is None
    return pages_to_move(target, tokens, first_page) * target.layers


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """One accepted ticket, ready to be turned into writes. `tokens`: how many must arrive."""

    layout: KVLayout
    region: MemoryRegion
    ticket: TransferTicket
    tokens: int

    @property
    def total_pages(self) -> int:
        return self.layout.pages_for(self.tokens)

    def refusal(self) -> str | None:
        """Why the ticket does not fit the request, or None."""
        if len(self.ticket.ranks) != 1:
            return f"ticket for {len(self.ticket.ranks)} ranks, this node has 1"
        rank = self.ticket.ranks[0]
        pages = pages_to_move(self.layout, self.tokens, self.ticket.first_page)
        if pages == 0 or len(rank.blocks) != pages:
            return f"ticket lists {len(rank.blocks)} blocks, {self.tokens} tokens need {pages}"
        if (max(rank.blocks) + 1) * self.layout.block_bytes > rank.region_length:
            return f"block {max(rank.blocks)} lies outside the registered pool of {rank.region_length} bytes"
        if rank.region_base + rank.region_length >= 1 << 64:
            return f"the pool at {rank.region_base:#x} does not fit into an address space"
        return None

    def pages_complete(self, computed: int) -> int:
        """Pages 0 .. n-1 that will not change any more once `computed` tokens are in the source pages."""
        return self.total_pages if computed >= self.tokens else computed // self.layout.page_size

    def layer_writes(self, layer: int, pages: range, source_blocks: Sequence[int]) -> PageWrites:
        """The writes of one layer's `pages` (all at or past the ticket's first page). `source_blocks`: the whole block
        table of the prompt on the prefill side."""
        rank = self.ticket.ranks[0]
        return PageWrites(
            source=self.region,
            source_indices=[source_blocks[page] for page in pages],
            source_stride=self.layout.block_bytes,
            source_offset=layer * self.layout.page_bytes,
            target=RemoteRegion(rank.region_key, rank.region_base, rank.region_length),
            target_indices=[rank.blocks[page - self.ticket.first_page] for page in pages],
            target_stride=self.layout.block_bytes,
            target_offset=layer * self.layout.page_bytes,
            length=self.layout.page_bytes,
            immediate=rank.immediate,
        )
