"""The sending half of a simulated engine: arms, queues and posts, fairly and within its caps, as the C core does."""

import ctypes
import errno
import os
import time
from collections import Counter
from collections.abc import Iterator

from fabric import paged
from fabric.api import Event, PageWrites, RailInDoubt, WritesEnded
from fabric.errors import OperationError
from fabric.limits import Limits
from fabric.rails import lanes
from fabric.simulated_batches import SimulatedBatch, SimulatedEndpoint, SimulatedWrite, WriteCounts
from fabric.simulated_network import NetworkUser, SimulatedNetwork

_QUANTUM = 8  # writes that one endpoint posts before the next has its turn


class SimulatedSender:
    """Every call under the network's lock. `events` collects what is to be reported."""

    def __init__(self, network: SimulatedNetwork, owner: NetworkUser, limits: Limits, rails: int) -> None:
        self._network = network
        self._owner = owner
        self._limits = limits
        self._rails = rails
        self.endpoints: dict[int, SimulatedEndpoint] = {}
        self.events: list[Event] = []
        self.posted_by_rail: Counter[int] = Counter()
        self.counts = WriteCounts()
        self.posted = self.bytes = self.retries = self.rails_lost = 0

    def connect(
        self, endpoint: int, peer: str, landing_addresses: list[bytes], without: set[int], can_move: bool
    ) -> None:
        rails = [rail for rail in range(self._rails) if rail not in without]
        self.endpoints[endpoint] = SimulatedEndpoint(
            endpoint, peer, landing_addresses, self.events, self.counts, rails, can_move, turn=endpoint
        )

    def close(self, endpoint: int) -> None:
        """What is in flight is not awaited."""
        closed = self.endpoints.pop(endpoint)
        self._network.close_sending(closed)
        self.events[:] = [e for e in self.events if not (isinstance(e, RailInDoubt) and e.endpoint == endpoint)]
        for batch in closed.batches.values():
            batch.stop()
        closed.in_flight.clear()
        for batch in list(closed.batches.values()):
            batch.cancel()

    @property
    def outstanding(self) -> int:
        return sum(endpoint.outstanding for endpoint in self.endpoints.values())

    @property
    def batches(self) -> Iterator[SimulatedBatch]:
        return (batch for endpoint in self.endpoints.values() for batch in endpoint.batches.values())

    @property
    def armed(self) -> list[SimulatedBatch]:
        return [batch for batch in self.batches if batch.word is not None]

    @property
    def has_work(self) -> bool:
        return bool(self.armed) or any(endpoint.queue for endpoint in self.endpoints.values())

    def submit(self, endpoint: int, handle: int, writes: PageWrites, word: tuple[int, int] | None) -> None:
        """`word`: (address, threshold), or None to post now."""
        paged.check(writes)
        rails = [rail for rail, _ in writes.source.remote.keys]
        ways = lanes(rails, writes.target.keys, chance=endpoint)
        usable = [lane for lane in ways if lane.rail in self.endpoints[endpoint].rails]
        batch = SimulatedBatch(handle, self.endpoints[endpoint], writes, usable)
        if not usable:
            batch.endpoint.fail(_unreachable(batch.endpoint.peer))
        if batch.endpoint.error is not None:
            batch.fail(batch.endpoint.error)
        elif word is None:
            batch.endpoint.queue.append(batch)
        else:
            batch.word = word

    def cancel(self, handle: int) -> tuple[int, int]:
        for batch in self.batches:
            if batch.handle == handle:
                batch.cancel()
                return batch.posted, batch.completed
        ended = (event for event in self.events if isinstance(event, WritesEnded) and event.handle == handle)
        return next(((event.posted, event.completed) for event in ended), (0, 0))

    def on_completed(self, write: SimulatedWrite, error: OperationError | None, now: int) -> None:
        batch, endpoint, rail = write.batch, write.batch.endpoint, write.lane.rail
        if error is not None and self._lose(endpoint, rail, error):
            return
        endpoint.in_flight[rail].remove(write)
        if error is not None:
            self.counts.failed += 1
            batch.fail(error)
            endpoint.fail(error, rail)
        else:
            self.counts.completed += 1
            endpoint.tallies[rail].add(batch.writes.immediate)
            batch.on_completed(now)

    def _lose(self, endpoint: SimulatedEndpoint, rail: int, error: OperationError) -> bool:
        """False if the endpoint cannot go on without it."""
        if not endpoint.lose(rail, error):
            return False
        self._network.close_port(endpoint, rail)
        self.rails_lost += 1
        return True

    def fire(self) -> None:
        """In threshold order, as a word that jumped past several must do."""
        for batch in sorted(self.armed, key=lambda batch: batch.word or (0, 0)):
            assert batch.word is not None
            address, threshold = batch.word
            if ctypes.c_uint64.from_address(address).value >= threshold:
                batch.word = None
                batch.endpoint.queue.append(batch)

    def post(self) -> None:
        """Round robin between endpoints; the first one goes to the back for the next turn."""
        posted = True
        while posted:
            posted = False
            for endpoint in list(self.endpoints.values()):
                posted |= self._post_some(endpoint)
        for first in list(self.endpoints)[:1]:
            self.endpoints[first] = self.endpoints.pop(first)

    def _may_post(self, endpoint: SimulatedEndpoint) -> bool:
        if not endpoint.queue:
            return False
        cap = self._limits.domain_writes * self._rails
        if self.outstanding < cap:
            return True
        busy = sum(bool(other.queue or other.outstanding) for other in self.endpoints.values())
        return endpoint.outstanding < max(1, cap // busy)

    def _post_some(self, endpoint: SimulatedEndpoint) -> bool:
        posted = False
        for _ in range(_QUANTUM):
            if not self._may_post(endpoint):
                break
            batch = endpoint.queue[0]
            if batch.unposted and not self._post_write(endpoint, batch):
                break
            posted = True
            if not batch.unposted and batch in endpoint.queue:
                endpoint.queue.remove(batch)
            batch.end_if_done()
        return posted

    def _post_write(self, endpoint: SimulatedEndpoint, batch: SimulatedBatch) -> bool:
        lane = batch.next_lane(self._limits.endpoint_writes)
        if lane is None:
            if not batch.has_way:
                endpoint.fail(_unreachable(endpoint.peer))
            return False
        code = self._network.try_post()
        if code == errno.EAGAIN:
            self.retries += 1
        elif code:
            error = _failed_post(code, endpoint.peer)
            if not self._lose(endpoint, lane.rail, error):
                endpoint.fail(error, lane.rail)
        else:
            self._network.launch(self._owner, batch.post(lane, time.monotonic_ns()))
            self.posted += 1
            self.posted_by_rail[lane.rail] += 1
            self.bytes += batch.writes.length
        return not code


def _unreachable(peer: str) -> OperationError:
    return _failed_post(errno.EHOSTUNREACH, peer)


def _failed_post(code: int, peer: str) -> OperationError:
    return OperationError("simulated post", code, os.strerror(code), "", peer)
