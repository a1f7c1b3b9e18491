"""The simulated network: what is in flight between the engines of one process, and when it lands.

Bytes really move, from and to real addresses, at the moment of delivery and not before: a source that is reused
too early, or a page reused without a fence, is corrupted here as it would be by a NIC. Time is counted in steps
that the engines' `progress` calls take; nothing depends on the clock. One lock guards all engines of a network.
"""

import ctypes
import errno
import os
import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fabric.api import MemoryRegion, RailKey
from fabric.errors import OperationError
from fabric.faults import Faults
from fabric.simulated_batches import SimulatedEndpoint, SimulatedWrite

ADDRESS_BYTES = 16


class NetworkUser(Protocol):
    """What the network asks of an engine, always under the network's lock."""

    changed: threading.Condition

    def landed(self, landing: int, rail: int, immediate: int, now: int) -> None: ...

    def region_of(self, key: RailKey) -> MemoryRegion | None: ...

    def completed(self, write: SimulatedWrite, error: OperationError | None, now: int) -> None: ...


@dataclass(eq=False, slots=True)
class _Flight:
    """A posted write on its way. `payload`: its bytes, once the sender no longer keeps the source for us, and wants no
    word of it."""

    sender: NetworkUser
    write: SimulatedWrite
    number: int
    due: int
    payload: bytes | None = None

    @property
    def endpoint(self) -> SimulatedEndpoint:
        return self.write.batch.endpoint

    @property
    def landing_address(self) -> bytes | None:
        return self.endpoint.address_of(self.write.lane)

    @property
    def path(self) -> tuple[SimulatedEndpoint, int]:
        """What keeps order."""
        return self.endpoint, self.write.lane.rail

    def move(self) -> None:
        ctypes.memmove(self.write.target, self.payload or self.write.source, self.write.batch.writes.length)


@dataclass(frozen=True, slots=True)
class _LateImmediate:
    receiver: NetworkUser
    landing: int
    immediate: int
    due: int


class SimulatedNetwork:
    """Connects the engines that were made with it. `seed` and `faults` decide all that chance decides."""

    def __init__(self, seed: int = 0, faults: Faults | None = None) -> None:
        self.lock = threading.RLock()
        self._faults = faults or Faults()
        self._random = random.Random(seed)
        self._engines: list[NetworkUser] = []
        self._landings: dict[bytes | None, tuple[NetworkUser, int]] = {}
        self._flights: list[_Flight] = []
        self._late: list[_LateImmediate] = []
        self._held: list[NetworkUser] = []
        self._dead: list[NetworkUser] = []
        self._steps = self._closings = self._posts = self._writes = self._busy = self._duplicates = 0

    # For tests, from any thread.

    def hold(self, receiver: NetworkUser) -> None:
        """Nothing lands at this engine until `release`: a paused process, or a stalled path."""
        with self.lock:
            self._held.append(receiver)

    def release(self, receiver: NetworkUser) -> None:
        with self.lock:
            self._held.remove(receiver)
            self.notify()

    def kill(self, engine: NetworkUser) -> None:
        """As kill -9: it does nothing more, writes to it fail, and what it posted before may still land."""
        with self.lock:
            self._detach(flight for flight in self._flights if flight.sender is engine)
            self._dead.append(engine)
            self.notify()

    def cut(self, sender: NetworkUser, rail: int) -> None:
        """Its connections over one rail break: of what is on its way some is lost, and all fails for it."""
        with self.lock:
            for flight in [f for f in self._flights if f.sender is sender and f.write.lane.rail == rail]:
                if self._random.random() < 0.5:
                    self._flights.remove(flight)
                if flight.payload is None:
                    self._detach([flight])
                    sender.completed(flight.write, self._error(errno.ECONNRESET, flight), time.monotonic_ns())
            self.notify()

    @property
    def in_flight(self) -> int:
        with self.lock:
            return len(self._flights)

    # For engines, under the lock.

    def join(self, engine: NetworkUser) -> None:
        self._engines.append(engine)

    def leave(self, engine: NetworkUser) -> None:
        self._engines.remove(engine)

    def notify(self) -> None:
        for engine in self._engines:
            engine.changed.notify_all()

    def is_dead(self, engine: NetworkUser) -> bool:
        return engine in self._dead

    def new_key(self) -> int:
        return self._random.getrandbits(64)

    def open_landing(self, engine: NetworkUser, endpoint: int) -> bytes:
        address = self._random.randbytes(ADDRESS_BYTES)
        self._landings[address] = engine, endpoint
        return address

    def close_landing(self, addresses: Sequence[bytes]) -> bool:
        """The fence, on all rails: writes in flight to it find no landing. False if it failed: they will."""
        self._closings += 1
        if self._closings == self._faults.fail_fence:
            return False
        for address in addresses:
            self._landings.pop(address, None)  # some rails may have been fenced before
        return True

    def close_sending(self, endpoint: SimulatedEndpoint) -> None:
        """Its writes in flight may still land, with the bytes that their sources have now."""
        self._detach(flight for flight in self._flights if flight.endpoint is endpoint)

    def close_port(self, endpoint: SimulatedEndpoint, rail: int) -> None:
        """The same for one of its rails."""
        self._detach(flight for flight in self._flights if flight.path == (endpoint, rail))

    @staticmethod
    def _detach(flights: Iterable[_Flight]) -> None:
        for flight in flights:
            flight.payload = ctypes.string_at(flight.write.source, flight.write.batch.writes.length)

    def try_post(self) -> int:
        """0, or the error number with which this post is refused."""
        if not self._busy and self._faults.busy_share and self._random.random() < self._faults.busy_share:
            self._busy = self._faults.busy_burst
        if self._busy:
            self._busy -= 1
            return errno.EAGAIN
        self._posts += 1
        return errno.ENOMEM if self._posts == self._faults.fail_post else 0

    def launch(self, sender: NetworkUser, write: SimulatedWrite) -> None:
        self._writes += 1
        self._flights.append(_Flight(sender, write, self._writes, self._due()))

    def _due(self) -> int:
        return self._steps + self._random.randint(0, self._faults.max_delay)

    def ended(self, receiver: NetworkUser, landing: int, immediate: int) -> None:
        """A generation ended at its receiver: now, and only now, the network may repeat its immediate."""
        if self._duplicates < self._faults.stale_duplicates:
            self._duplicates += 1
            self._late.append(_LateImmediate(receiver, landing, immediate, self._due()))

    def step(self) -> bool:
        """Delivers at most one write. True while something that is not held is in flight."""
        self._steps += 1
        self._deliver_late()
        flight = self._choose()
        if flight is not None:
            self._flights.remove(flight)
            self._deliver(flight)
        return bool(self._late) or any(not self._is_held(flight) for flight in self._flights)

    def _deliver_late(self) -> None:
        for late in [late for late in self._late if late.due <= self._steps]:
            self._late.remove(late)
            late.receiver.landed(late.landing, 0, late.immediate, time.monotonic_ns())

    def _is_held(self, flight: _Flight) -> bool:
        landing = self._landings.get(flight.landing_address)
        return landing is not None and landing[0] in self._held

    def _choose(self) -> _Flight | None:
        """Any that is due when reordering, else the first whose path has no earlier write under way."""
        due = [flight for flight in self._flights if flight.due <= self._steps and not self._is_held(flight)]
        if self._faults.reorder:
            return self._random.choice(due) if due else None
        blocked: set[tuple[SimulatedEndpoint, int]] = set()
        for flight in self._flights:
            if flight in due and flight.path not in blocked:
                return flight
            blocked.add(flight.path)
        return None

    def _deliver(self, flight: _Flight) -> None:
        now = time.monotonic_ns()
        code = self._land(flight, now)
        if flight.payload is None:
            flight.sender.completed(flight.write, self._error(code, flight) if code else None, now)

    @staticmethod
    def _error(code: int, flight: _Flight) -> OperationError:
        return OperationError("simulated write", code, os.strerror(code), "", flight.endpoint.peer)

    def _land(self, flight: _Flight, now: int) -> int:
        """0, or the error number that the sender gets."""
        write, writes = flight.write, flight.write.batch.writes
        receiver, landing = self._landings.get(flight.landing_address, (None, 0))
        if receiver is None or receiver in self._dead:
            return errno.ECONNRESET
        region = receiver.region_of(write.lane.remote)
        if region is None or not 0 <= write.target - region.address <= region.length - writes.length:
            return errno.EACCES
        failed = flight.number == self._faults.fail_completion
        if failed and self._random.random() < 0.5:
            return errno.EIO
        flight.move()
        if flight.number != self._faults.drop_immediate:
            receiver.landed(landing, write.lane.remote.rail, writes.immediate, now)
        return errno.EIO if failed else 0
