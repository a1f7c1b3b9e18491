"""The fabric without a network: several engines in one process, each used by its own thread, over a
`SimulatedNetwork` that reorders, delays and fails by a seeded script. Same contract as libfabric's engine, and the
same conformance suite. `progress(0)` takes exactly one turn, so a single thread replays a run exactly.
"""

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import count

from fabric import paged
from fabric.api import (
    Event,
    FabricCounters,
    FabricGauges,
    Landing,
    MemoryRegion,
    PageWrites,
    RailKey,
    RemoteRegion,
    Sending,
    TransferEngine,
)
from fabric.counting import ImmediateCounter
from fabric.errors import EndpointClosed, FabricUsageError, FenceFailed, OperationError
from fabric.faults import Faults
from fabric.immediates import pack
from fabric.limits import Limits
from fabric.simulated_batches import SimulatedWrite
from fabric.simulated_network import ADDRESS_BYTES, SimulatedNetwork
from fabric.simulated_sender import SimulatedSender

__all__ = ["Faults", "SimulatedEngine", "SimulatedNetwork"]

_STEPS_PER_TURN = 16
_NAP_SECONDS = 0.0005  # between turns while words are armed or writes in flight


def _addresses(landing: bytes) -> list[bytes]:
    """By rail."""
    return [landing[at : at + ADDRESS_BYTES] for at in range(0, len(landing), ADDRESS_BYTES)]


class SimulatedEngine(TransferEngine):
    """`name` appears in nothing but its repr. Every call takes the network's lock."""

    provider = "simulated"
    moves_writes = True
    """Of a rail that fails, to others: writes complete for their sender once they have landed, not before, and landings
    may be closed while their peers live."""

    def __init__(self, network: SimulatedNetwork, name: str = "", limits: Limits | None = None, rails: int = 1) -> None:
        self.changed = threading.Condition(network.lock)
        self._network = network
        self._name = name
        self.rails = rails
        self._ids = count(1)
        self._closed = self._woken = False
        self._unfenced = 0
        self._regions: dict[int, MemoryRegion] = {}
        self._landings: dict[int, Landing] = {}
        self._fenced: dict[int, set[int]] = {}  # rails, by landing
        self._rails_fenced = 0
        self._sender = SimulatedSender(network, self, limits or Limits(), rails)
        self._counting = ImmediateCounter()
        network.join(self)

    def __repr__(self) -> str:
        return f"SimulatedEngine({self._name!r})"

    # What the network asks, under its lock.

    def landed(self, landing: int, rail: int, immediate: int, now: int) -> None:
        self._counting.count(landing, rail, immediate, now)
        self.changed.notify_all()

    def region_of(self, key: RailKey) -> MemoryRegion | None:
        return next((region for region in self._regions.values() if key in region.remote.keys), None)

    def completed(self, write: SimulatedWrite, error: OperationError | None, now: int) -> None:
        self._sender.on_completed(write, error, now)
        self.changed.notify_all()

    # Memory and endpoints.

    def register(
        self,
        address: int,
        length: int,
        device: int | None = None,
        file: int | None = None,
        file_offset: int = 0,
        rails: Sequence[int] | None = None,
    ) -> MemoryRegion:
        paged.check_memory(address, length)
        reached = paged.check_rails(rails, self.rails)
        if device is not None:
            raise FabricUsageError("the simulated network copies between memories of the host alone")
        with self._network.lock:
            self._check_open()
            keys = tuple(RailKey(rail, self._network.new_key()) for rail in reached)
            remote = RemoteRegion(keys, address, length)
            region = MemoryRegion(next(self._ids), address, length, remote)
            self._regions[region.id] = region
            return region

    def deregister(self, region: MemoryRegion) -> None:
        with self._network.lock:
            if self._regions.pop(region.id, None) is None:
                raise FabricUsageError(f"region {region.id} is not registered here")

    def open_landing(self, peer: str) -> Landing:
        with self._network.lock:
            self._check_open()
            endpoint = next(self._ids)
            addresses = [self._network.open_landing(self, endpoint) for _ in range(self.rails)]
            landing = Landing(endpoint, peer, b"".join(addresses))
            self._landings[endpoint] = landing
            return landing

    def connect(
        self, peer: str, landing_address: bytes, without: Collection[int] = (), asks_peer: bool = False
    ) -> Sending:
        paged.check_without(without, self.rails)
        with self._network.lock:
            self._check_open()
            sending = Sending(next(self._ids), peer)
            can_move = asks_peer and self.moves_writes
            self._sender.connect(sending.id, peer, _addresses(landing_address), set(without), can_move)
            return sending

    def provider_of(self, endpoint: Landing | Sending) -> str:
        return self.provider

    def fence_needs_dead_peer(self, landing: Landing) -> bool:
        return False

    def close_endpoint(self, endpoint: Landing | Sending) -> None:
        with self._network.lock:
            if isinstance(endpoint, Landing):
                if not self._close_landing(self._landing(endpoint)):
                    raise FenceFailed(f"endpoint {endpoint.id} to {endpoint.peer} is not closed: by the script")
            else:
                self._check_sending(endpoint)
                self._sender.close(endpoint.id)

    def fence_rails(self, landing: Landing, rails: Collection[int], completed: Mapping[int, int]) -> list[int]:
        with self._network.lock:
            addresses = _addresses(self._landing(landing).address)
            fenced = self._fenced.setdefault(landing.id, set())
            paged.check_fenced(rails, self.rails, fenced)
            if self.fence_needs_dead_peer(landing):
                raise FabricUsageError("a landing is closed only once its peer is dead")
            fenced.update(rails)
            self._rails_fenced += len(set(rails))
            if not self._network.close_landing([addresses[rail] for rail in rails]):
                raise FenceFailed(f"rails {sorted(rails)} of {landing.peer} are not closed: by the script")
            return [i for i, count in completed.items() if self._counting.take_back(landing.id, rails, i, count)]

    def settle_rail(self, endpoint: Sending, rail: int, again: Collection[int]) -> None:
        with self._network.lock:
            self._check_sending(endpoint)
            self._sender.endpoints[endpoint.id].settle(rail, again, time.monotonic_ns())
            self.changed.notify_all()

    def _close_landing(self, landing: Landing) -> bool:
        """False if the fence failed."""
        del self._landings[landing.id]
        self._fenced.pop(landing.id, None)
        self._counting.drop(landing.id)
        fenced = self._network.close_landing(_addresses(landing.address))
        self._unfenced += not fenced
        return fenced

    def _check_open(self) -> None:
        if self._closed:
            raise FabricUsageError("the engine is closed")

    def _landing(self, landing: Landing) -> Landing:
        if landing.id not in self._landings:
            raise EndpointClosed(f"endpoint {landing.id} to {landing.peer} is closed")
        return landing

    def _check_sending(self, sending: Sending) -> None:
        if sending.id not in self._sender.endpoints:
            raise EndpointClosed(f"endpoint {sending.id} to {sending.peer} is closed")

    # Writes.

    def write(self, endpoint: Sending, batch: PageWrites) -> int:
        return self._submit(endpoint, batch, None)

    def write_when(self, endpoint: Sending, word_address: int, threshold: int, batch: PageWrites) -> int:
        paged.check_word(word_address, threshold)
        return self._submit(endpoint, batch, (word_address, threshold))

    def _submit(self, endpoint: Sending, batch: PageWrites, word: tuple[int, int] | None) -> int:
        with self._network.lock:
            self._check_sending(endpoint)
            if batch.source.id not in self._regions:
                raise FabricUsageError(f"source region {batch.source.id} is not registered here")
            handle = next(self._ids)
            self._sender.submit(endpoint.id, handle, batch, word)
            return handle

    def cancel(self, handle: int) -> tuple[int, int]:
        with self._network.lock:
            return self._sender.cancel(handle)

    # Expectations.

    def expect(self, landing: Landing, immediate: int, count: int) -> int:
        with self._network.lock:
            self._landing(landing)
            paged.check_count(count, at_least=1)
            paged.check_immediate(immediate)
            handle = next(self._ids)
            self._counting.expect(landing.id, handle, immediate, count)
            return handle

    def revise(self, handle: int, count: int) -> None:
        paged.check_count(count, at_least=0)
        with self._network.lock:
            self._counting.revise(handle, count)

    def counted(self, handle: int) -> int:
        with self._network.lock:
            return self._counting.find(handle).count

    def forget(self, handle: int) -> None:
        with self._network.lock:
            ended = self._counting.forget(handle)
            if ended is not None and ended.count:
                self._network.ended(self, ended.landing, pack(ended.slot, ended.generation))

    # Progress.

    def progress(self, timeout: float) -> list[Event]:
        deadline = time.monotonic() + timeout
        with self._network.lock:
            self._check_open()
            while True:
                busy = self._turn()
                events = self._take_events()
                remaining = deadline - time.monotonic()
                if events or self._woken or remaining <= 0:
                    self._woken = False
                    return events
                self.changed.wait(min(remaining, _NAP_SECONDS) if busy else remaining)

    def _turn(self) -> bool:
        """One turn; True if the next one may do more without anybody's help."""
        if self._network.is_dead(self):
            return False
        self._sender.fire()
        self._sender.post()
        moving = [self._network.step() for _ in range(_STEPS_PER_TURN)][-1]
        return moving or self._sender.has_work

    def _take_events(self) -> list[Event]:
        events: list[Event] = [*self._counting.take_events(), *self._sender.events]
        self._sender.events.clear()
        return events

    def wake(self) -> None:
        with self._network.lock:
            self._woken = True
            self.changed.notify_all()

    def counters(self) -> FabricCounters:
        with self._network.lock:
            return FabricCounters(
                writes_posted=self._sender.posted,
                writes_completed=self._sender.counts.completed,
                writes_failed=self._sender.counts.failed,
                bytes_posted=self._sender.bytes,
                immediates_counted=self._counting.counted,
                stale_immediates=self._counting.stale,
                over_counts=self._counting.over_counts,
                post_retries=self._sender.retries,
                rails_lost=self._sender.rails_lost + self._rails_fenced,
            )

    def writes_by_rail(self) -> list[int]:
        with self._network.lock:
            return [self._sender.posted_by_rail[rail] for rail in range(self.rails)]

    def gauges(self) -> FabricGauges:
        with self._network.lock:
            return FabricGauges(
                outstanding=self._sender.outstanding,
                armed=len(self._sender.armed),
                expectations=len(self._counting),
                endpoints=len(self._landings) + len(self._sender.endpoints) + self._unfenced,
                regions=len(self._regions),
            )

    def close(self) -> None:
        with self._network.lock:
            if self._closed:
                return
            self._closed = True
            fenced = [self._close_landing(landing) for landing in list(self._landings.values())]
            for sending in list(self._sender.endpoints):
                self._sender.close(sending)
            self._regions.clear()
            self._sender.events.clear()
            self._network.leave(self)
            if not all(fenced):
                raise FenceFailed("a landing is not closed: by the script")
