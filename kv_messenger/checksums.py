"""Debug mode: checksums of pages, computed on both sides and compared before the first read."""

import ctypes
import zlib
from collections.abc import Sequence

from protocol.layout import KVLayout


def page_checksums(pool_address: int, layout: KVLayout, blocks: Sequence[int]) -> bytes:
    """CRC-32 of each page, layer by layer, `blocks` in order within a layer; little-endian u32. `pool_address` is the
    start of a pool in this process."""
    sums = bytearray()
    for layer in range(layout.layers):
        for block in blocks:
            address = pool_address + block * layout.block_bytes + layer * layout.page_bytes
            page = (ctypes.c_char * layout.page_bytes).from_address(address)
            sums += zlib.crc32(page).to_bytes(4, "little")
    return bytes(sums)


def first_difference(ours: bytes, theirs: bytes, pages_per_layer: int) -> str | None:
    """Where two checksum lists differ first, for people; None if they are equal."""
    if len(ours) != len(theirs):
        return f"{len(theirs) // 4} checksums for {len(ours) // 4} pages"
    for index in range(0, len(ours), 4):
        if ours[index : index + 4] != theirs[index : index + 4]:
            layer, page = divmod(index // 4, pages_per_layer)
            return f"page {page} of layer {layer} differs from its source"
    return None
