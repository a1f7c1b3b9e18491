"""The fabric without a network: several engines in one process, each used by its own thread, over a
`SimulatedNetwork` that reorders, delays and fails by a seeded script. Same contract as libfabric's engine, and the
same conformance suite. `progress(0)` takes exactly one turn, so a single thread replays a run exactly.
"""

import ctypes
import errno
import os
import threading
import time
from itertools import count

from fabric import paged
from fabric.api import Event, FabricCounters, Landing, MemoryRegion, PageWrites, RemoteRegion, Sending, TransferEngine
from fabric.counting import ImmediateCounter
from fabric.errors import EndpointClosed, FabricUsageError, OperationError
from fabric.faults import Faults
from fabric.immediates import pack
from fabric.limits import Limits
from fabric.simulated_batches import SimulatedBatch, SimulatedEndpoint
from fabric.simulated_network import SimulatedNetwork

__all__ = ["Faults", "SimulatedEngine", "SimulatedNetwork"]

_STEPS_PER_TURN = 16
_QUANTUM = 8  # writes that one endpoint posts before the next has its turn
_NAP_SECONDS = 0.0005  # between turns while words are armed or writes in flight


class SimulatedEngine(TransferEngine):
    """`name` appears in nothing but its repr. Every call takes the network's lock."""

    provider = "simulated"
    fence_needs_dead_peer = False

    def __init__(self, network: SimulatedNetwork, name: str = "", limits: Limits | None = None) -> None:
        self.changed = threading.Condition(network.lock)
        self._network = network
        self._name = name
        self._limits = limits or Limits()
        self._ids = count(1)
        self._closed = self._woken = False
        self._regions: dict[int, MemoryRegion] = {}
        self._landings: dict[int, Landing] = {}
        self._sendings: dict[int, SimulatedEndpoint] = {}
        self._counting = ImmediateCounter()
        self._events: list[Event] = []
        self._posted = self._completed = self._failed = self._bytes = self._retries = self._outstanding = 0
        network.join(self)

    def __repr__(self) -> str:
        return f"SimulatedEngine({self._name!r})"

    # What the network asks, under its lock.

    def landed(self, landing: int, immediate: int, now: int) -> None:
        self._counting.count(landing, immediate, now)
        self.changed.notify_all()

    def region_of(self, key: int) -> MemoryRegion | None:
        return next((region for region in self._regions.values() if region.remote.key == key), None)

    def completed(self, batch: SimulatedBatch, error: OperationError | None, now: int) -> None:
        self._outstanding -= 1
        self._completed += error is None
        self._failed += error is not None
        batch.on_completed(error, now)
        self.changed.notify_all()

    # Memory and endpoints.

    def register(self, address: int, length: int) -> MemoryRegion:
        paged.check_memory(address, length)
        with self._network.lock:
            self._check_open()
            remote = RemoteRegion(self._network.new_key(), address, length)
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
            landing = Landing(endpoint, peer, self._network.open_landing(self, endpoint))
            self._landings[endpoint] = landing
            return landing

    def connect(self, peer: str, landing_address: bytes) -> Sending:
        with self._network.lock:
            self._check_open()
            sending = Sending(next(self._ids), peer)
            self._sendings[sending.id] = SimulatedEndpoint(sending.id, peer, landing_address, self._events)
            return sending

    def close_endpoint(self, endpoint: Landing | Sending) -> None:
        with self._network.lock:
            if isinstance(endpoint, Landing):
                self._network.close_landing(self._landing(endpoint).address)
                self._counting.drop(endpoint.id)
                del self._landings[endpoint.id]
            else:
                self._close_sending(self._sending(endpoint))

    def _close_sending(self, sending: SimulatedEndpoint) -> None:
        self._network.close_sending(sending)
        self._outstanding -= sending.outstanding
        for batch in list(sending.batches.values()):
            batch.abandon()
        del self._sendings[sending.id]

    def _check_open(self) -> None:
        if self._closed:
            raise FabricUsageError("the engine is closed")

    def _landing(self, landing: Landing) -> Landing:
        if landing.id not in self._landings:
            raise EndpointClosed(f"endpoint {landing.id} to {landing.peer} is closed")
        return landing

    def _sending(self, sending: Sending) -> SimulatedEndpoint:
        if sending.id not in self._sendings:
            raise EndpointClosed(f"endpoint {sending.id} to {sending.peer} is closed")
        return self._sendings[sending.id]

    # Writes.

    def write(self, endpoint: Sending, batch: PageWrites) -> int:
        with self._network.lock:
            queued = self._submit(endpoint, batch)
            if not queued.ended:
                queued.endpoint.queue.append(queued)
            return queued.handle

    def write_when(self, endpoint: Sending, word_address: int, threshold: int, batch: PageWrites) -> int:
        paged.check_word(word_address)
        with self._network.lock:
            armed = self._submit(endpoint, batch)
            if not armed.ended:
                armed.word = word_address, threshold
            return armed.handle

    def _submit(self, endpoint: Sending, batch: PageWrites) -> SimulatedBatch:
        sending = self._sending(endpoint)
        paged.check(batch)
        if batch.source.id not in self._regions:
            raise FabricUsageError(f"source region {batch.source.id} is not registered here")
        submitted = SimulatedBatch(next(self._ids), sending, batch)
        if sending.error is not None:
            submitted.fail(sending.error)
        return submitted

    def cancel(self, handle: int) -> tuple[int, int]:
        with self._network.lock:
            for sending in self._sendings.values():
                if handle in sending.batches:
                    batch = sending.batches[handle]
                    batch.cancel()
                    return batch.posted, batch.completed
            return 0, 0

    # Expectations.

    def expect(self, landing: Landing, immediate: int, count: int) -> int:
        with self._network.lock:
            self._landing(landing)
            if count <= 0:
                raise FabricUsageError(f"an expectation counts at least one write, not {count}")
            handle = next(self._ids)
            self._counting.expect(landing.id, handle, immediate, count)
            return handle

    def revise(self, handle: int, count: int) -> None:
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
        self._fire()
        self._post()
        moving = [self._network.step() for _ in range(_STEPS_PER_TURN)][-1]
        return moving or any(sending.queue for sending in self._sendings.values()) or bool(self._armed())

    def _armed(self) -> list[SimulatedBatch]:
        batches = (batch for sending in self._sendings.values() for batch in sending.batches.values())
        return [batch for batch in batches if batch.word is not None]

    def _fire(self) -> None:
        """In threshold order, as a word that jumped past several must do."""
        for batch in sorted(self._armed(), key=lambda batch: batch.word or (0, 0)):
            assert batch.word is not None
            address, threshold = batch.word
            if ctypes.c_uint64.from_address(address).value >= threshold:
                batch.word = None
                batch.endpoint.queue.append(batch)

    def _post(self) -> None:
        """Round robin between endpoints; the first one goes to the back for the next turn."""
        posted = True
        while posted:
            posted = False
            for sending in list(self._sendings.values()):
                posted |= self._post_some(sending)
        for first in list(self._sendings)[:1]:
            self._sendings[first] = self._sendings.pop(first)

    def _may_post(self, sending: SimulatedEndpoint) -> bool:
        room = sending.outstanding < self._limits.endpoint_writes
        return (
            bool(sending.queue) and room and (not sending.outstanding or self._outstanding < self._limits.domain_writes)
        )

    def _post_some(self, sending: SimulatedEndpoint) -> bool:
        posted = False
        for _ in range(_QUANTUM):
            if not self._may_post(sending):
                break
            batch = sending.queue[0]
            if batch.unposted and not self._post_write(sending, batch):
                break
            posted = True
            if not batch.unposted and batch in sending.queue:
                sending.queue.remove(batch)
            batch.end_if_done()
        return posted

    def _post_write(self, sending: SimulatedEndpoint, batch: SimulatedBatch) -> bool:
        code = self._network.try_post()
        if code == errno.EAGAIN:
            self._retries += 1
        elif code:
            sending.fail(OperationError("simulated post", code, os.strerror(code), "", sending.peer))
        else:
            self._network.launch(self, batch)
            batch.on_posted(time.monotonic_ns())
            self._posted += 1
            self._outstanding += 1
            self._bytes += batch.writes.length
        return not code

    def _take_events(self) -> list[Event]:
        events: list[Event] = [*self._counting.take_events(), *self._events]
        self._events.clear()
        return events

    def wake(self) -> None:
        with self._network.lock:
            self._woken = True
            self.changed.notify_all()

    def counters(self) -> FabricCounters:
        with self._network.lock:
            return FabricCounters(
                writes_posted=self._posted,
                writes_completed=self._completed,
                writes_failed=self._failed,
                bytes_posted=self._bytes,
                immediates_counted=self._counting.counted,
                stale_immediates=self._counting.stale,
                over_counts=self._counting.over_counts,
                post_retries=self._retries,
                outstanding=self._outstanding,
                armed=len(self._armed()),
                expectations=len(self._counting),
                endpoints=len(self._landings) + len(self._sendings),
                regions=len(self._regions),
            )

    def close(self) -> None:
        with self._network.lock:
            if self._closed:
                return
            self._closed = True
            for endpoint in list(self._landings.values()):
                self.close_endpoint(endpoint)
            for sending in list(self._sendings.values()):
                self._close_sending(sending)
            self._regions.clear()
            self._events.clear()
            self._network.leave(self)
