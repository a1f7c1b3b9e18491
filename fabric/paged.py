"""The address arithmetic of `PageWrites`, and the bounds of what callers hand in. Pure."""

from collections.abc import Iterator, Sequence

from fabric.api import PageWrites
from fabric.errors import FabricUsageError


def writes(batch: PageWrites) -> Iterator[tuple[int, int]]:
    """(source address, target address) of each write; the target counts from the peer's base, see RemoteRegion."""
    source = batch.source.address + batch.source_offset
    target = batch.target.base + batch.target_offset
    for i, j in zip(batch.source_indices, batch.target_indices, strict=True):
        yield source + i * batch.source_stride, target + j * batch.target_stride


def check(batch: PageWrites) -> None:
    """Raises FabricUsageError for a batch that leaves its source or its target, or does not pair its indices."""
    if len(batch.source_indices) != len(batch.target_indices):
        raise FabricUsageError(f"{len(batch.source_indices)} source against {len(batch.target_indices)} target indices")
    _check_side(
        "source", batch.source_indices, batch.source_stride, batch.source_offset, batch.length, batch.source.length
    )
    _check_side(
        "target", batch.target_indices, batch.target_stride, batch.target_offset, batch.length, batch.target.length
    )


def check_memory(address: int, length: int) -> None:
    """Raises FabricUsageError for what cannot be memory."""
    if address <= 0 or length <= 0:
        raise FabricUsageError(f"{length} bytes at {address:#x} are no memory")


def check_word(address: int) -> None:
    """Raises FabricUsageError unless a u64 can be loaded atomically there."""
    if not address or address % 8:
        raise FabricUsageError(f"a trigger word must be an aligned u64, not {address:#x}")


def _check_side(side: str, indices: Sequence[int], stride: int, offset: int, length: int, available: int) -> None:
    if min(stride, offset, length) < 0:
        raise FabricUsageError(f"negative {side} stride {stride}, offset {offset} or length {length}")
    if not indices:
        return
    end = max(indices) * stride + offset + length
    if min(indices) < 0 or end > available:
        raise FabricUsageError(
            f"{side} writes reach byte {end} of a region of {available}, lowest index {min(indices)}"
        )
