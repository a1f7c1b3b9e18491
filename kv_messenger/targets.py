"""Where a decode node's KV goes: its engines, each with the pools of its ranks and somebody who waits for the KV."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fabric.api import MemoryRegion
from kv_messenger.attempts import Arrival
from kv_messenger.regions import as_ticketed
from protocol.messages import Failure, PrefillTimes
from protocol.ticket import ContextSlot, RankRegion, TransferKey


class TargetOwner(Protocol):
    """Called on the pump's thread; must return at once. Each key gets exactly one of `kv_arrived` and `kv_failed` (none
    if it was cancelled), and exactly one `pages_safe`, in any order. `prefill_timed` may come for keys of others."""

    def kv_arrived(self, arrival: Arrival) -> None: ...

    def kv_failed(self, key: TransferKey, failure: Failure) -> None: ...

    def pages_safe(self, key: TransferKey) -> None: ...

    def prefill_timed(self, key: TransferKey, times: PrefillTimes) -> None: ...


@dataclass(frozen=True, eq=False)
class Target:
    """One engine. `regions`: its ranks' registered pools, in the order of ranks. `context`: its registered context
    slots, if its layout has any."""

    owner: TargetOwner
    regions: Sequence[MemoryRegion]
    context: MemoryRegion | None = None

    @property
    def pools(self) -> list[int]:
        """Where each rank's pool begins."""
        return [region.address for region in self.regions]

    @property
    def remote(self) -> list[RankRegion]:
        """As peers need it."""
        return [as_ticketed(region.remote) for region in self.regions]

    def context_slot(self, slot: int | None) -> ContextSlot | None:
        """As peers need it."""
        if slot is None:
            return None
        assert self.context is not None, "a slot of no memory"
        return ContextSlot(region=as_ticketed(self.context.remote), slot=slot)
