"""What of an engine's memory peers read from and write to, registered with the fabric."""

from collections.abc import Sequence
from dataclasses import dataclass

from fabric.api import MemoryRegion, TransferEngine

Place = tuple[int, int, int | None, int | None, int]
"""Address, bytes, the ordinal of the CUDA device that it is on, or None, the memfd that it is a mapping of, or None,
and from which byte of that on."""


@dataclass(frozen=True, eq=False)
class EngineMemory:
    """Of one engine. `pools`: its ranks', in the order of ranks. `context`: its context slots, if it keeps contexts."""

    pools: Sequence[MemoryRegion]
    context: MemoryRegion | None = None


def register(fabric: TransferEngine, pools: Sequence[Place], context: Place | None) -> EngineMemory:
    """Raises as `TransferEngine.register` does."""
    return EngineMemory([fabric.register(*pool) for pool in pools], fabric.register(*context) if context else None)
