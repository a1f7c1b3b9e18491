"""The simulated fabric under a schedule: every posted write lands, and completes for its sender, at a time of its own.

Built on `fabric.simulated`, whose engine passes the conformance suite; what differs is who decides when a write moves.
Bytes move for real, at the moment of landing. A write may complete for its sender before it lands (the kernel has the
bytes), after it, or both may fail independently when a connection breaks.
"""

import ctypes
import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fabric.api import EndpointFailed, Event, Landing
from fabric.errors import OperationError
from fabric.limits import Limits
from fabric.simulated import SimulatedEngine, SimulatedNetwork
from fabric.simulated_batches import SimulatedEndpoint, SimulatedWrite
from fabric.simulated_network import NetworkUser
from tests.simulation.errors import Violation
from tests.simulation.schedule import Process, Schedule
from tests.simulation.script import Manners

LATEST_NEWS_S = 6.0
"""A sender whose peer fenced it may hear nothing for so long."""


@dataclass(eq=False, slots=True)
class Flight:
    """A posted write on its way. `payload`: its bytes, once the sender does not keep the source for it any more: then
    it has completed for its sender, or will never."""

    sender: NetworkUser
    write: SimulatedWrite
    transfer: str
    """Whose page it brings, as its sender has it."""
    payload: bytes | None = None

    @property
    def endpoint(self) -> SimulatedEndpoint:
        return self.write.batch.endpoint

    @property
    def target(self) -> int:
        return self.write.target

    @property
    def landing(self) -> bytes | None:
        return self.endpoint.address_of(self.write.lane)

    def detach(self) -> None:
        if self.payload is None:
            self.payload = self.bytes

    @property
    def bytes(self) -> bytes:
        """What would land now."""
        return self.payload or ctypes.string_at(self.write.source, self.write.batch.writes.length)

    def move(self) -> None:
        ctypes.memmove(self.target, self.payload or self.write.source, self.write.batch.writes.length)


OnLanding = Callable[[Flight], None]


class ScheduledEngine(SimulatedEngine):
    """`on_change`: something may have to be reported or posted. `on_landing` looks at each write before it lands."""

    def __init__(
        self,
        network: "ScheduledNetwork",
        process: Process,
        on_change: Callable[[], None],
        rails: int = 1,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(network, process.name, limits, rails)
        self.process = process
        self.on_landing: OnLanding = lambda flight: None
        self.transfer_of: Callable[[int], str] = lambda handle: ""
        """By a batch's handle."""
        self.held: list[Flight] = []
        """Writes that wait for this process to go on."""
        self._needs_dead_peer = network.needs_dead_peer
        self.moves_writes = not (network.needs_dead_peer or network.manners.early_share)
        self.changed: Any = _Notice(on_change)

    def fence_needs_dead_peer(self, landing: Landing) -> bool:
        return self._needs_dead_peer

    def progress(self, timeout: float) -> list[Event]:
        sender = self._sender
        if any(endpoint.batches for endpoint in sender.endpoints.values()):
            sender.fire()
            sender.post()
        return self._take_events()

    @property
    def has_news(self) -> bool:
        """Something of its writes is to be reported, after a batch was cancelled or an endpoint closed."""
        return bool(self._sender.events)

    @property
    def stuck(self) -> bool:
        """Something could be posted but for EAGAIN: nobody but time will change that."""
        return any(endpoint.queue and not endpoint.outstanding for endpoint in self.sendings)

    @property
    def unposted(self) -> list[tuple[list[bytes], int]]:
        """(landing, by rail; address) of each write that may still be posted."""
        return [
            (batch.endpoint.landing_addresses, target)
            for batch in self._sender.batches
            if batch.unposted
            for target in (batch.addresses[index][1] for index in batch.to_post)
        ]

    @property
    def landings(self) -> list[Landing]:
        return list(self._landings.values())

    @property
    def sendings(self) -> list[SimulatedEndpoint]:
        return list(self._sender.endpoints.values())

    def landing_failed(self, landing: Landing, error: OperationError) -> None:
        if landing.id in self._landings:
            self._sender.events.append(EndpointFailed(landing.id, landing.peer, error))
            self.changed.notify_all()


class _Notice:
    """What the engine takes for its condition."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.notify_all = call


class ScheduledNetwork(SimulatedNetwork):
    """`fail_next`, `lose_next`: engines whose next write fails, or lands without being counted."""

    def __init__(self, schedule: Schedule, manners: Manners, needs_dead_peer: bool) -> None:
        super().__init__(schedule.random.getrandbits(32))
        self.needs_dead_peer = needs_dead_peer
        self.flights: list[Flight] = []
        self.fail_next: list[NetworkUser] = []
        self.lose_next: list[NetworkUser] = []
        self._schedule = schedule
        self.manners = manners
        self._last: dict[tuple[int, ...], float] = {}
        """By endpoint and rail, when its latest write lands, where writes keep their order."""

    # ---- what the engine asks ----

    def try_post(self) -> int:
        busy = self.manners.busy_share and self._schedule.random.random() < self.manners.busy_share
        return errno.EAGAIN if busy else 0

    def launch(self, sender: NetworkUser, write: SimulatedWrite) -> None:
        assert isinstance(sender, ScheduledEngine)
        flight = Flight(sender, write, sender.transfer_of(write.batch.handle))
        self.flights.append(flight)
        delay, random = self._delay(flight.endpoint.id, write.lane.rail), self._schedule.random
        if sender in self.fail_next:
            self.fail_next.remove(sender)
            self._schedule.after(delay, lambda: self._fail(flight, random.random() < 0.5))
            return
        if random.random() < self.manners.early_share:
            self._schedule.after(0.0, lambda: self._complete_early(flight))
        self._schedule.after(delay, lambda: self._arrive(flight))

    def close_sending(self, endpoint: SimulatedEndpoint) -> None:
        for flight in self.flights:
            if flight.endpoint is endpoint:
                flight.detach()

    def close_port(self, endpoint: SimulatedEndpoint, rail: int) -> None:
        for flight in self.flights:
            if flight.endpoint is endpoint and flight.write.lane.rail == rail:
                flight.detach()

    def close_landing(self, addresses: Sequence[bytes]) -> bool:
        if self.needs_dead_peer:
            self._check_quiet(addresses)
        return super().close_landing(addresses)

    def ended(self, receiver: NetworkUser, landing: int, immediate: int) -> None:
        if self._schedule.random.random() < self.manners.duplicate_share:
            self._schedule.after(
                self._schedule.within(0.1), lambda: receiver.landed(landing, 0, immediate, time.monotonic_ns())
            )

    def step(self) -> bool:
        return False

    # ---- what the world does ----

    def died(self, engine: ScheduledEngine) -> None:
        """It does nothing more; what it had posted lies in buffers and may still land. Its peers' writes fail."""
        self.kill(engine)
        for flight in [flight for flight in self.flights if flight.sender is engine]:
            flight.detach()
            if self._schedule.random.random() < 0.5:
                self.flights.remove(flight)
        engine.held.clear()

    def released(self, engine: ScheduledEngine) -> None:
        """Its process goes on."""
        held, engine.held = engine.held, []
        for flight in held:
            self._schedule.after(self._schedule.within(self.manners.write_delay), partial(self._arrive, flight))

    def break_writes(self, endpoint: SimulatedEndpoint) -> None:
        """A connection breaks: each write on its way is lost, or lands; either way it fails for its sender."""
        for flight in [flight for flight in self.flights if flight.endpoint is endpoint]:
            self._fail(flight, self._schedule.random.random() < 0.5)
        if endpoint.error is None:
            endpoint.fail(_error(errno.ECONNRESET, endpoint.peer))
        owner = next(engine for engine in self._scheduled() if endpoint in engine.sendings)
        owner.changed.notify_all()

    def may_land(self, engine: ScheduledEngine) -> set[int]:
        """Addresses in this engine's memory that somebody may still write to."""
        mine = {address for address, (owner, _) in self._landings.items() if owner is engine}
        aimed = {flight.target for flight in self.flights if flight.landing in mine}
        for other in self._scheduled():
            if not other.process.dead:
                aimed |= {target for landing, target in other.unposted if not mine.isdisjoint(landing)}
        return aimed

    # ---- inside ----

    def _scheduled(self) -> list[ScheduledEngine]:
        return [engine for engine in self._engines if isinstance(engine, ScheduledEngine)]

    def _delay(self, *path: int) -> float:
        delay = self._schedule.within(self.manners.write_delay)
        if self.manners.ordered:
            due = max(self._schedule.now + delay, self._last.get(path, 0.0))
            self._last[path] = due
            return due - self._schedule.now
        return delay

    def _complete_early(self, flight: Flight) -> None:
        """The kernel has the bytes: the sender need not keep them."""
        if flight in self.flights and flight.payload is None:
            flight.detach()
            self._complete(flight, 0)

    def _complete(self, flight: Flight, code: int) -> None:
        if not self.is_dead(flight.sender) and not flight.write.batch.ended:
            error = _error(code, flight.endpoint.peer) if code else None
            flight.sender.completed(flight.write, error, time.monotonic_ns())

    def _fail(self, flight: Flight, lands: bool) -> None:
        """It fails for its sender now, or has completed before; it lands later, or never."""
        if flight not in self.flights:
            return
        if flight.payload is None:
            flight.detach()
            self._complete(flight, errno.EIO)
            self._schedule.after(self._schedule.within(self.manners.write_delay), lambda: self._arrive(flight))
        if not lands:
            self.flights.remove(flight)

    def _arrive(self, flight: Flight) -> None:
        if flight not in self.flights:
            return
        receiver, _ = self._landings.get(flight.landing, (None, 0))
        if isinstance(receiver, ScheduledEngine) and receiver.process.paused and not self.manners.lands_while_paused:
            receiver.held.append(flight)
            return
        self.flights.remove(flight)
        code = self._land_at(receiver, flight)
        if flight.payload is not None:
            return
        if code:  # a fenced sender may not hear of it for long
            late = self._schedule.within(self._schedule.random.choice([0.0, 0.1, LATEST_NEWS_S]))
            self._schedule.after(late, lambda: self._complete(flight, code))
        else:
            self._complete(flight, 0)

    def _land_at(self, receiver: NetworkUser | None, flight: Flight) -> int:
        """0, or the error number that its sender gets."""
        lane, writes = flight.write.lane, flight.write.batch.writes
        if not isinstance(receiver, ScheduledEngine) or self.is_dead(receiver):
            return errno.ECONNRESET
        region = receiver.region_of(lane.remote)
        if region is None or not 0 <= flight.target - region.address <= region.length - writes.length:
            return errno.EACCES
        receiver.on_landing(flight)
        flight.move()
        if flight.sender in self.lose_next:
            self.lose_next.remove(flight.sender)
        else:
            landing = self._landings[flight.landing][1]
            receiver.landed(landing, lane.remote.rail, writes.immediate, time.monotonic_ns())
        return 0

    def _check_quiet(self, addresses: Sequence[bytes]) -> None:
        for flight in self.flights:
            living = isinstance(flight.sender, ScheduledEngine) and not flight.sender.process.dead
            if flight.landing in addresses and living:
                raise Violation("a landing was closed under the fire of a living peer, where that crashes")


def _error(code: int, peer: str) -> OperationError:
    return OperationError("simulated write", code, os.strerror(code), "", peer)
