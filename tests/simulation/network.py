"""The simulated fabric under a schedule: every posted write lands, and completes for its sender, at a time of its own.

Built on `fabric.simulated`, whose engine passes the conformance suite; what differs is who decides when a write moves.
Bytes move for real, at the moment of landing. A write may complete for its sender before it lands (the kernel has the
bytes), after it, or both may fail independently when a connection breaks.
"""

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fabric.errors import OperationError
from fabric.simulated import SimulatedNetwork
from fabric.simulated_batches import SimulatedEndpoint, SimulatedWrite
from fabric.simulated_network import NetworkUser
from tests.simulation.errors import Violation
from tests.simulation.fabric import ScheduledEngine
from tests.simulation.flights import Flight
from tests.simulation.schedule import Schedule
from tests.simulation.script import Manners

LATEST_NEWS_S = 6.0
"""A sender whose peer fenced it may hear nothing for so long."""
BREAK_IS_NOTICED_S = [0.0, 0.01, 0.5]
"""How long a sender may take to notice that a rail is broken."""
STRAY_S = 0.5
"""How late a write may come that was on a rail as it broke."""


class ScheduledNetwork(SimulatedNetwork):
    """`fail_next`, `lose_next`: engines whose next write fails, or lands without being counted. `broken`: rails, and
    whose they are."""

    def __init__(self, schedule: Schedule, manners: Manners, needs_dead_peer: bool) -> None:
        super().__init__(schedule.random.getrandbits(32))
        self.needs_dead_peer = needs_dead_peer
        self.flights: list[Flight] = []
        self.fail_next: list[NetworkUser] = []
        self.lose_next: list[NetworkUser] = []
        self.broken: list[tuple[NetworkUser, int]] = []
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
        if any(self._takes(flight, *broken) for broken in self.broken):
            self._derail(flight)
            return
        delay, random = self._delay(flight.endpoint.id, flight.rail), self._schedule.random
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
            if flight.endpoint is endpoint and flight.rail == rail:
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

    def break_rail(self, engine: ScheduledEngine, rail: int, lasting: float | None) -> None:
        """Of what is on its way there, and what is posted there as long as it lasts (None: for good), some lands late
        and some never, and its senders hear nothing of it until they notice."""
        broken = engine, rail
        self.broken.append(broken)
        if lasting is not None:
            self._schedule.after(lasting, lambda: self.broken.remove(broken) if broken in self.broken else None)
        for flight in [flight for flight in self.flights if self._takes(flight, engine, rail)]:
            self._derail(flight)

    def may_land(self, engine: ScheduledEngine) -> set[int]:
        """Addresses in this engine's memory that somebody may still write to."""
        mine = {address for address, (owner, _) in self._landings.items() if owner is engine}
        aimed = {flight.target for flight in self.flights if flight.landing in mine}
        for other in self._scheduled():
            if not other.process.dead:
                aimed |= {target for landing, target in other.unposted if not mine.isdisjoint(landing)}
                aimed |= {write.target for write in other.doubtful if self._comes_again(write, engine)}
        return aimed

    # ---- inside ----

    def _comes_again(self, write: SimulatedWrite, engine: ScheduledEngine) -> bool:
        """In doubt, and to a landing of this engine's that has asked for it, and is open."""
        addresses = write.batch.endpoint.landing_addresses
        opened = [self._landings[address] for address in addresses if address in self._landings]
        rail, immediate = write.lane.remote.rail, write.batch.writes.immediate
        return any(owner is engine and (of, rail, immediate) in engine.to_repeat for owner, of in opened)

    def _takes(self, flight: Flight, engine: NetworkUser, rail: int) -> bool:
        """Whether it goes by way of this rail of this engine's."""
        receiver, _ = self._landings.get(flight.landing, (None, 0))
        ends = (flight.sender, flight.rail), (receiver, flight.remote_rail)
        return (engine, rail) in ends

    def _derail(self, flight: Flight) -> None:
        if flight.derailed:
            return
        self.flights.remove(flight)
        stray, random = replace(flight, derailed=True), self._schedule.random
        if random.random() < 0.5:
            self.flights.append(stray)
            late = self._schedule.within(random.choice([self.manners.write_delay, STRAY_S]))
            self._schedule.after(late, lambda: self._arrive(stray))
        assert isinstance(flight.sender, ScheduledEngine)
        noticed = self._schedule.within(random.choice(BREAK_IS_NOTICED_S))
        self._schedule.after(noticed, lambda: self._notice(stray), flight.sender.process)

    def _notice(self, stray: Flight) -> None:
        stray.detach()
        self._complete(stray, errno.EIO)

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
        if not self.is_dead(flight.sender) and flight.awaited:
            error = _error(code, flight.endpoint.peer) if code else None
            flight.completed = not code
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
        if flight.payload is not None or flight.derailed:
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
        landing, lost = self._landings[flight.landing][1], flight.sender in self.lose_next
        if lost:
            self.lose_next.remove(flight.sender)
        else:
            receiver.landed(landing, flight.remote_rail, flight.immediate, time.monotonic_ns())
        receiver.counts.landed(landing, flight, lost)
        return 0

    def _check_quiet(self, addresses: Sequence[bytes]) -> None:
        for flight in self.flights:
            living = isinstance(flight.sender, ScheduledEngine) and not flight.sender.process.dead
            if flight.landing in addresses and living:
                raise Violation("a landing was closed under the fire of a living peer, where that crashes")


def _error(code: int, peer: str) -> OperationError:
    return OperationError("simulated write", code, os.strerror(code), "", peer)
