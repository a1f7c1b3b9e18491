"""What a ticket must say of the context that crosses, and how both sides compare it in debug mode."""

import ctypes
import zlib

from fabric.api import MemoryRegion
from protocol.context import ContextLayout
from protocol.ticket import ContextSlot


def refuse_slot(wanted: ContextLayout, slot: ContextSlot | None) -> str | None:
    """Why a ticket's slot does not fit what its node wants, or None."""
    if (slot is not None) != bool(wanted.parts):
        which = "without a" if slot is None else "with a"
        return f"ticket {which} context slot, its node wants {' and '.join(wanted.names) or 'no context'}"
    if slot is None:
        return None
    region = slot.region
    if (slot.slot + 1) * wanted.slot_bytes > region.length:
        return f"context slot {slot.slot} lies outside the registered {region.length} bytes"
    if region.base + region.length >= 1 << 64:
        return f"the contexts at {region.base:#x} do not fit into an address space"
    return None


def slot_checksums(slots: MemoryRegion | None, slot: int | None, held: ContextLayout, moved: ContextLayout) -> bytes:
    """Of each part of `moved`, in a slot of layout `held` of this process; little-endian u32. Empty without a slot."""
    if slots is None or slot is None:
        return b""
    crcs, begin = [], slots.address + slot * held.slot_bytes
    for part in moved.parts:
        data = (ctypes.c_char * part.bytes).from_address(begin + held.offset(part.name))
        crcs.append(zlib.crc32(data).to_bytes(4, "little"))
    return b"".join(crcs)
