"""The sending side of the simulated fabric: batches, their endpoint's queue and rails, and how they end."""

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from fabric.api import EndpointFailed, Event, PageWrites, RailInDoubt, WritesEnded, WritesFailed
from fabric.counting import Tallies
from fabric.errors import OperationError
from fabric.paged import writes
from fabric.rails import Lane


@dataclass(slots=True)
class WriteCounts:
    """How posted writes ended, over all endpoints of an engine; each once for each time that it was posted."""

    completed: int = 0
    failed: int = 0


@dataclass(eq=False, slots=True)
class SimulatedWrite:
    """One that was posted: which of its batch, by which way."""

    batch: "SimulatedBatch"
    lane: Lane
    index: int

    @property
    def source(self) -> int:
        return self.batch.addresses[self.index][0]

    @property
    def target(self) -> int:
        return self.batch.addresses[self.index][1]


@dataclass(eq=False, slots=True)
class SimulatedEndpoint:
    """A sending endpoint. `landing_addresses`: by the peer's rail. `events`: what its engine has to report, in order.
    `counts`: its engine's. `turn`: counts the writes, so that rails take turns. `can_move`: writes of a rail that fails
    may be asked about."""

    id: int
    peer: str
    landing_addresses: list[bytes]
    events: list[Event]
    counts: WriteCounts
    rails: list[int]  # those to be used
    can_move: bool
    batches: "dict[int, SimulatedBatch]" = field(default_factory=dict)  # by handle, until they end
    queue: "deque[SimulatedBatch]" = field(default_factory=deque)  # to post now
    in_flight: "dict[int, list[SimulatedWrite]]" = field(default_factory=lambda: defaultdict(list))  # by our rail
    remotes: "dict[int, set[int]]" = field(default_factory=lambda: defaultdict(set))  # written to, by our rail
    tallies: "dict[int, Tallies]" = field(default_factory=lambda: defaultdict(Tallies))  # of completed ones, likewise
    lost: "dict[int, OperationError]" = field(default_factory=dict)  # rails that failed while it went on
    lost_remotes: "set[int]" = field(default_factory=set)  # the peer's rails that take no writes any more
    doubtful: "set[int]" = field(default_factory=set)  # of ours that are lost, the ones with writes in doubt
    turn: int = 0
    error: OperationError | None = None

    @property
    def outstanding(self) -> int:
        return sum(map(len, self.in_flight.values()))

    def address_of(self, lane: Lane) -> bytes | None:
        """None: the peer has no such rail."""
        rail = lane.remote.rail
        return self.landing_addresses[rail] if rail < len(self.landing_addresses) else None

    def takes(self, lane: Lane) -> bool:
        """Neither our rail nor the peer's is lost."""
        usable = lane.rail in self.rails and lane.rail not in self.lost
        return usable and lane.remote.rail not in self.lost_remotes

    def on_posted(self, write: SimulatedWrite) -> None:
        self.in_flight[write.lane.rail].append(write)
        self.remotes[write.lane.rail].add(write.lane.remote.rail)
        self.tallies[write.lane.rail].begin(write.batch.writes.immediate)

    def fail(self, error: OperationError, rail: int | None = None) -> None:
        """It breaks, by a failed write on `rail`: all that is not posted yet, or is in doubt, fails with the same
        reason."""
        if self.error is not None:
            return
        self.error = error
        self.events[:] = [e for e in self.events if not (isinstance(e, RailInDoubt) and e.endpoint == self.id)]
        self.events.append(EndpointFailed(self.id, self.peer, error, rail if len(self.rails) > 1 else None))
        for batch in list(self.batches.values()):
            if batch.unposted or batch.in_doubt:
                batch.fail(error)

    def lose(self, rail: int, error: OperationError) -> bool:
        """A rail fails, and its port is closed. False if the endpoint cannot go on without it. With writes on their way
        the peer's rails that it has written to are lost with it: they are to be fenced."""
        before = self.lost, self.lost_remotes
        self.lost = self.lost | {rail: error}
        if self.in_flight[rail]:
            self.lost_remotes = self.lost_remotes | self.remotes[rail]
        if not self._goes_on_without(rail):
            self.lost, self.lost_remotes = before
            return False
        for write in self.in_flight[rail]:
            if write.batch.stopped:
                write.batch.leave_doubt(rail)
                write.batch.end_if_done()
        doubts = {write.batch.writes.immediate for write in self.in_flight[rail]}
        if doubts:
            self.doubtful.add(rail)
        completed = {immediate: self.tallies[rail].of(immediate) for immediate in doubts}
        remotes = tuple(sorted(self.remotes[rail]))
        self.events.append(RailInDoubt(self.id, self.peer, error, rail, remotes, completed))
        return True

    def settle(self, rail: int, again: Collection[int], now: int) -> None:
        if rail not in self.doubtful:
            return
        self.doubtful.remove(rail)
        settled, self.in_flight[rail] = self.in_flight[rail], []
        for write in settled:
            if write.batch.writes.immediate in again:
                self.counts.failed += 1
                write.batch.take_back(write)
            else:
                self.counts.completed += 1
                write.batch.on_completed(now)

    def _goes_on_without(self, rail: int) -> bool:
        if self.error is not None or not set(self.rails) - set(self.lost):
            return False
        if not self.in_flight[rail]:
            return True
        others = set().union(*(self.remotes[other] for other in self.remotes if other != rail))
        ways = all(write.batch.stopped or write.batch.has_way for write in self.in_flight[rail])
        return self.can_move and ways and others.isdisjoint(self.remotes[rail])


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
    again: list[int] = field(default_factory=list)  # taken back: `posted` is without them
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

    @property
    def to_post(self) -> list[int]:
        """Which of its writes, in order."""
        return self.again + list(range(self.posted + len(self.again), len(self.addresses)))

    @property
    def outstanding(self) -> bool:
        return any(write.batch is self for flying in self.endpoint.in_flight.values() for write in flying)

    @property
    def in_doubt(self) -> bool:
        doubtful = self.endpoint.doubtful
        return any(write.batch is self for rail in doubtful for write in self.endpoint.in_flight[rail])

    @property
    def has_way(self) -> bool:
        return any(map(self.endpoint.takes, self.lanes))

    def next_lane(self, cap: int) -> Lane | None:
        """The next one that takes another write; their turns go on from batch to batch."""
        for _ in self.lanes:
            lane = self.lanes[self.endpoint.turn % len(self.lanes)]
            self.endpoint.turn += 1
            if len(self.endpoint.in_flight[lane.rail]) < cap and self.endpoint.takes(lane):
                return lane
        return None

    def post(self, lane: Lane, now: int) -> SimulatedWrite:
        write = SimulatedWrite(self, lane, self.again.pop(0) if self.again else self.posted)
        self.first_posted_ns = self.first_posted_ns or now
        self.last_posted_ns = now
        self.posted += 1
        self.endpoint.on_posted(write)
        return write

    def on_completed(self, now: int) -> None:
        """One posted write is accounted for, and not in flight any more."""
        self.completed_ns = now
        self.completed += 1
        self.end_if_done()

    def take_back(self, write: SimulatedWrite) -> None:
        """It did not land, as far as anybody counts it: it is to be posted again, before those never posted."""
        self.posted -= 1
        self.again.append(write.index)
        if self not in self.endpoint.queue:
            self.endpoint.queue.appendleft(self)

    def leave_doubt(self, rail: int) -> None:
        """It was stopped: its writes there end as posted and not completed."""
        kept = [write for write in self.endpoint.in_flight[rail] if write.batch is not self]
        failed = len(self.endpoint.in_flight[rail]) - len(kept)
        if failed:
            self.endpoint.counts.failed += failed
            self.error = self.error or self.endpoint.lost[rail]
            self.endpoint.in_flight[rail] = kept

    def stop(self) -> None:
        """Nothing more of it will be posted."""
        self.stopped = True
        self.word = None
        for rail in self.endpoint.doubtful:
            self.leave_doubt(rail)
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

    def end_if_done(self) -> None:
        if self.ended or self.unposted or self.outstanding:
            return
        self.ended = True
        del self.endpoint.batches[self.handle]
        size = self.completed * self.writes.length
        times = self.first_posted_ns, self.last_posted_ns, self.completed_ns
        self.endpoint.events.append(
            WritesEnded(self.handle, self.posted, self.completed, size, self.cancelled, self.error, *times)
        )
