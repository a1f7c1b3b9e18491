"""Debug mode: checksums of what was moved, computed on both sides and compared before the first read.

One per page of the decode side, over the bytes of its tokens in the order [head][part][token], wherever they lie: so
that neither page sizes nor the number of ranks matter. What a page holds beside the prompt's tokens is left out.
"""

import ctypes
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protocol.layout import KVLayout


class Place(NamedTuple):
    """A page of the decode side, in one layer, and the slots [start, stop) of the request that belong into it.
    `ordinal`: of the layer within its group."""

    layer: int
    group: int
    ordinal: int
    page: int
    start: int
    stop: int


def places(target: KVLayout, tokens: int, first_page: int) -> Iterator[Place]:
    """Every page that is moved, layer by layer."""
    layers = [(layer, index, o) for index, group in enumerate(target.groups) for o, layer in enumerate(group.layers)]
    for layer, index, ordinal in sorted(layers):
        slots = target.groups[index].slots(tokens)
        for page in range(first_page, target.pages_for(index, tokens)):
            start = page * target.page_size
            yield Place(layer, index, ordinal, page, start, min(start + target.page_size, slots))


@dataclass(frozen=True, slots=True)
class HeldPages:
    """One side's pages of a request. `pools`: where each rank's pool begins in this process. `tables`: block ids by
    group, from page `first_page` on."""

    layout: KVLayout
    pools: Sequence[int]
    tables: Sequence[Sequence[int]]
    first_page: int = 0

    def checksum(self, replica_set: int, place: Place) -> int:
        """CRC-32 of what this set of ranks holds of it."""
        ranks, crc = self.layout.replica_set(replica_set), 0
        for head in range(self.layout.kv_heads):
            rank = ranks[head // self.layout.rank_heads]
            for part in range(self.layout.parts):
                for address, size in self._pieces(place, rank, head, part):
                    crc = zlib.crc32((ctypes.c_char * size).from_address(address), crc)
        return crc

    def _pieces(self, place: Place, rank: int, head: int, part: int) -> Iterator[tuple[int, int]]:
        """(address, bytes) of one part of one head, in token order: one for each page of this side."""
        layout, slot = self.layout, place.start
        within = (head - layout.heads_of(rank).start) * layout.parts + part
        while slot < place.stop:
            page, first = divmod(slot, layout.page_size)
            count = min(place.stop - slot, layout.page_size - first)
            address = self.pools[rank] + self.tables[place.group][page - self.first_page] * layout.block_bytes(
                place.group
            )
            address += place.ordinal * layout.page_bytes
            yield address + (within * layout.page_size + first) * layout.token_bytes, count * layout.token_bytes
            slot += count


def checksums(held: HeldPages, replica_sets: Sequence[int], moved: Sequence[Place]) -> bytes:
    """Set by set, in the order of `moved`; little-endian u32."""
    return b"".join(held.checksum(s, place).to_bytes(4, "little") for s in replica_sets for place in moved)


def first_difference(ours: bytes, theirs: bytes, moved: Sequence[Place], context: Sequence[str] = ()) -> str | None:
    """Where two lists of checksums differ first, for people; None if they are equal. `context`: the names of its parts,
    whose checksums come last."""
    if len(ours) != len(theirs):
        return f"{len(theirs) // 4} checksums came, of {len(ours) // 4}"
    pages = len(ours) // 4 - len(context)
    for index in range(len(ours) // 4):
        if ours[4 * index : 4 * index + 4] != theirs[4 * index : 4 * index + 4]:
            if index >= pages:
                return f"the context's {context[index - pages]} is not its source's"
            replica_set, at = divmod(index, len(moved))
            return f"page {moved[at].page} of layer {moved[at].layer} in replica set {replica_set} is not its source's"
    return None
