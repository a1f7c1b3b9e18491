"""The address arithmetic of `PageWrites`, and the bounds of what callers hand in. Pure."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from fabric.api import PageWrites
from fabric.errors import FabricUsageError
from fabric.limits import MAX_RAILS

ADDRESS_SPACE = 1 << 64


def writes(batch: PageWrites) -> Iterator[tuple[int, int]]:
    """(source address, target address) of each write; the target counts from the peer's base, see RemoteRegion."""
    source = batch.source.address + batch.source_offset
    target = batch.target.base + batch.target_offset
    for i, j in zip(batch.source_indices, batch.target_indices, strict=True):
        yield source + i * batch.source_stride, target + j * batch.target_stride


class _Side(NamedTuple):
    name: str
    base: int
    available: int
    indices: Sequence[int]
    stride: int
    offset: int


def check(batch: PageWrites) -> None:
    """Raises FabricUsageError for a batch that leaves its source, its target or the address space, that does not pair
    its indices, or whose numbers do not fit what the network carries."""
    source, target = batch.source, batch.target
    if len(batch.source_indices) != len(batch.target_indices):
        raise FabricUsageError(f"{len(batch.source_indices)} source against {len(batch.target_indices)} target indices")
    _check_bits("length", batch.length, 64)
    for rail, key in target.keys:
        if not 0 <= rail < MAX_RAILS:
            raise FabricUsageError(f"no peer has a rail {rail}")
        _check_bits("key", key, 64)
    check_immediate(batch.immediate)
    _check_side(
        _Side("source", source.address, source.length, batch.source_indices, batch.source_stride, batch.source_offset),
        batch.length,
    )
    _check_side(
        _Side("target", target.base, target.length, batch.target_indices, batch.target_stride, batch.target_offset),
        batch.length,
    )


def check_rails(rails: Sequence[int] | None, available: int) -> list[int]:
    """Those that are meant. Raises FabricUsageError for what is none of them."""
    if rails is None:
        return list(range(available))
    if not rails or len(set(rails)) < len(rails) or not set(rails) <= set(range(available)):
        raise FabricUsageError(f"{list(rails)} are no rails of {available}")
    return list(rails)


def check_without(without: Collection[int], available: int) -> None:
    """Raises FabricUsageError where no rail would be left."""
    if available and set(range(available)) <= set(without):
        raise FabricUsageError(f"none of {available} rails is left without {sorted(without)}")


def check_fenced(rails: Collection[int], available: int, before: Collection[int]) -> None:
    """Raises FabricUsageError unless a landing on `available` rails may have these fenced, after those `before`."""
    if available == 1 or not set(rails) <= set(range(available)) - set(before):
        raise FabricUsageError(f"rails {sorted(rails)} of {available} cannot be fenced, after {sorted(before)}")


def check_memory(address: int, length: int) -> None:
    """Raises FabricUsageError for what cannot be memory."""
    if address <= 0 or length <= 0 or address + length > ADDRESS_SPACE:
        raise FabricUsageError(f"{length} bytes at {address:#x} are no memory")


def check_word(address: int, threshold: int) -> None:
    """Raises FabricUsageError unless a u64 can be loaded atomically there, and can reach the threshold."""
    if not 0 < address < ADDRESS_SPACE or address % 8:
        raise FabricUsageError(f"a trigger word must be an aligned u64, not {address:#x}")
    _check_bits("threshold", threshold, 64)


def check_immediate(immediate: int) -> None:
    """Raises FabricUsageError for what is no 32-bit immediate."""
    _check_bits("immediate", immediate, 32)


def check_count(count: int, at_least: int) -> None:
    """Raises FabricUsageError for what no expectation can count to."""
    if count < at_least:
        raise FabricUsageError(f"an expectation counts at least {at_least} writes here, not {count}")
    _check_bits("count", count, 63)


def _check_bits(name: str, value: int, bits: int) -> None:
    if not 0 <= value < 1 << bits:
        raise FabricUsageError(f"{name} {value} is no number of {bits} bits")


def _check_side(side: _Side, length: int) -> None:
    _check_bits(f"{side.name} stride", side.stride, 64)
    _check_bits(f"{side.name} offset", side.offset, 64)
    _check_bits(f"{side.name} base", side.base, 64)
    _check_bits(f"{side.name} base plus offset", side.base + side.offset, 64)
    if not side.indices:
        return
    lowest, highest = min(side.indices), max(side.indices)
    end = highest * side.stride + side.offset + length
    if lowest < 0 or highest >= ADDRESS_SPACE or end > side.available or side.base + end > ADDRESS_SPACE:
        raise FabricUsageError(
            f"{side.name} writes reach byte {end} of a region of {side.available} at {side.base:#x}, "
            f"by indices from {lowest} to {highest}"
        )
