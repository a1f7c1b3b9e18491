"""The sending side of the simulated fabric: batches, their endpoint's queue, and how they end."""

from collections import Counter, deque
from dataclasses import dataclass, field

from fabric.api import EndpointFailed, Event, PageWrites, WritesEnded, WritesFailed
from fabric.errors import OperationError
from fabric.paged import writes
from fabric.rails import Lane


@dataclass(eq=False, slots=True)
class SimulatedEndpoint:
    """A sending endpoint. `landing_addresses`: by the peer's rail. `events`: what its engine has to report, in order.
    `turn`: counts the writes, so that rails take turns."""

    id: int
    peer: str
    landing_addresses: list[bytes]
    events: list[Event]
    rails: list[int]  # those in use
    batches: "dict[int, SimulatedBatch]" = field(default_factory=dict)  # by handle, until they end
    queue: "deque[SimulatedBatch]" = field(default_factory=deque)  # to post now
    outstanding: "Counter[int]" = field(default_factory=Counter)  # by our rail
    turn: int = 0
    error: OperationError | None = None

    def address_of(self, lane: Lane) -> bytes | None:
        """None: the peer has no such rail."""
        rail = lane.remote.rail
        return self.landing_addresses[rail] if rail < len(self.landing_addresses) else None

    def fail(self, error: OperationError, rail: int | None = None) -> None:
        """A failed write, on `rail`, breaks its endpoint: all that is not posted yet fails with the same reason."""
        if self.error is not None:
            return
        self.error = error
        self.events.append(EndpointFailed(self.id, self.peer, error, rail if len(self.rails) > 1 else None))
        for batch in list(self.batches.values()):
            if batch.unposted:
                batch.fail(error)


@dataclass(eq=False, slots=True)
class SimulatedBatch:
    handle: int
    endpoint: SimulatedEndpoint
    writes: PageWrites
    lanes: list[Lane]
    addresses: list[tuple[int, int]] = field(init=False)
    word: tuple[int, int] | None = None  # (address, threshold) while armed
    posted: int = 0
    completed: int = 0
    outstanding: int = 0
    stopped: bool = False
    cancelled: bool = False
    ended: bool = False
    error: OperationError | None = None
    first_posted_ns: int = 0
    last_posted_ns: int = 0
    completed_ns: int = 0

    def __post_init__(self) -> None:
        self.addresses = list(writes(self.writes))
        self.endpoint.batches[self.handle] = self

    @property
    def unposted(self) -> bool:
        return not self.stopped and self.posted < len(self.addresses)

    def next_lane(self, cap: int) -> Lane | None:
        """The next one that takes another write; their turns go on from batch to batch."""
        for _ in self.lanes:
            lane = self.lanes[self.endpoint.turn % len(self.lanes)]
            self.endpoint.turn += 1
            if self.endpoint.outstanding[lane.rail] < cap:
                return lane
        return None

    def on_posted(self, lane: Lane, now: int) -> None:
        self.first_posted_ns = self.first_posted_ns or now
        self.last_posted_ns = now
        self.posted += 1
        self.outstanding += 1
        self.endpoint.outstanding[lane.rail] += 1

    def on_completed(self, lane: Lane, error: OperationError | None, now: int) -> None:
        """One posted write is accounted for; `error` if it failed."""
        self.outstanding -= 1
        self.endpoint.outstanding[lane.rail] -= 1
        self.completed_ns = now
        if error is None:
            self.completed += 1
            self.end_if_done()
        else:
            self.fail(error)
            self.endpoint.fail(error, lane.rail)

    def stop(self) -> None:
        """Nothing more of it will be posted."""
        self.stopped = True
        self.word = None
        if self in self.endpoint.queue:
            self.endpoint.queue.remove(self)

    def fail(self, error: OperationError) -> None:
        if self.error is None:
            self.error = error
            self.endpoint.events.append(WritesFailed(self.handle, self.posted, error))
        self.stop()
        self.end_if_done()

    def cancel(self) -> None:
        self.cancelled = True
        self.stop()
        self.end_if_done()

    def abandon(self) -> None:
        """Its endpoint closes: whatever is in flight is not awaited."""
        self.outstanding = 0
        self.cancel()

    def end_if_done(self) -> None:
        if self.ended or self.outstanding or self.unposted:
            return
        self.ended = True
        del self.endpoint.batches[self.handle]
        size = self.completed * self.writes.length
        times = self.first_posted_ns, self.last_posted_ns, self.completed_ns
        self.endpoint.events.append(
            WritesEnded(self.handle, self.posted, self.completed, size, self.cancelled, self.error, *times)
        )
