"""Where a prefill node's KV comes from: its engines, each with the pools of its ranks and a progress word."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fabric.api import MemoryRegion
from protocol.messages import Failure


class EnginePort(Protocol):
    """A prefill engine, as the sender needs it. Calls return at once and are carried out in order, on its thread."""

    def submit(self, request_id: str, tokens: Sequence[int], refused: Callable[[Failure], None]) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def release(self, request_id: str) -> None: ...


@dataclass(frozen=True, eq=False)
class Source:
    """One engine. `word_address`: its progress word. `regions`: its ranks' registered pools, in the order of ranks.
    `context`: its registered context slots, if its layout has any."""

    engine: EnginePort
    word_address: int
    regions: Sequence[MemoryRegion]
    context: MemoryRegion | None = None

    @property
    def pool_bytes(self) -> int:
        """Of each rank."""
        return self.regions[0].length

    @property
    def pools(self) -> list[int]:
        """Where each rank's pool begins."""
        return [region.address for region in self.regions]
