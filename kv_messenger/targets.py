"""Where a decode node's KV goes: its engines, each with the pools of its ranks."""

from dataclasses import dataclass

from fabric.api import MemoryRegion
from protocol.ticket import RankRegion


@dataclass(frozen=True, slots=True)
class Target:
    """One engine. `regions`: its ranks' registered pools, in the order of ranks."""

    regions: tuple[MemoryRegion, ...]

    @property
    def pools(self) -> list[int]:
        """Where each rank's pool begins."""
        return [region.address for region in self.regions]

    @property
    def remote(self) -> list[RankRegion]:
        """As peers need it."""
        return [
            RankRegion(key=region.remote.key, base=region.remote.base, length=region.remote.length)
            for region in self.regions
        ]
