"""One request on a decode node, and the books it keeps of its own time."""

from dataclasses import dataclass, field
from enum import Enum

from engine.request import Request
from kv_messenger.attempts import Arrival
from protocol.ledger import Ledger
from protocol.messages import DecodeRequest, FailureCode, PrefillAddress, PrefillTimes
from protocol.ticket import TransferKey


class JobState(Enum):
    QUEUED = "queued"
    """Holds no pages."""
    WAITING_FOR_KV = "waiting for KV"
    """Holds pages; a prefill node writes into them."""
    RUNNING = "running"
    """In the engine's schedule."""


@dataclass(slots=True)
class Job:
    """`received_ns`, `asked_ns`, ...: monotonic nanoseconds on this node, 0 where it has not happened. `untried`: the
    prefill nodes still worth asking, best first. `deadline`: monotonic seconds."""

    request: DecodeRequest
    received_ns: int
    deadline: float
    untried: list[PrefillAddress]
    state: JobState = JobState.QUEUED
    attempt: int = 0
    computed: int = 0
    """Tokens of the prompt whose KV is there when it joins the schedule."""
    peer: PrefillAddress | None = None
    asked_ns: int = 0
    started_ns: int = 0
    """KV is there, or the engine took the whole prompt."""
    first_token_ns: int = 0
    tokens: int = 0
    arrival: Arrival | None = None
    times: PrefillTimes | None = None
    living: dict[int, str] = field(default_factory=dict)
    """Its choices that have not ended: the engine's ids of them, by index."""
    safe: set[int] = field(default_factory=set)
    """Attempts whose pages were declared safe while we still held them."""
    failures: set[FailureCode] = field(default_factory=set)
    """Of its attempts here."""
    _next: Request | None = None

    @property
    def id(self) -> str:
        return self.request.request

    def next_request(self) -> Request:
        """What the next attempt gives to the engine; the same one until that begins, for it knows its block hashes."""
        if self._next is None:
            wanted = self.request
            self._next = Request(self.id, wanted.prompt, wanted.sampling, attempt=self.attempt + 1, n=wanted.n)
        return self._next

    def begin_attempt(self) -> None:
        self.attempt += 1
        self._next = None

    def key(self, instance: str) -> TransferKey:
        """Of the current attempt."""
        return TransferKey(self.id, self.attempt, instance)

    def ledger(self, node: str) -> Ledger:
        """What is known by now; zero where it is not."""
        if self.arrival is None or self.peer is None:
            return Ledger(
                decode_node=node,
                attempts=self.attempt,
                queue_s=_seconds(self.received_ns, self.started_ns),
                prefill_s=_seconds(self.started_ns, self.first_token_ns),
            )
        times = self.times or PrefillTimes(chunks=0, queue_s=0.0, prefill_s=0.0, early_writes=0, last_chunk_writes=0)
        waited = _seconds(self.asked_ns, self.arrival.arrived_ns)
        queued = min(times.queue_s, waited)
        # The last layer's KV leaves before its forward ends: computing counts only as far as we waited for it.
        computing = min(times.prefill_s, waited - queued)
        return Ledger(
            decode_node=node,
            prefill_node=self.peer.name,
            provider=self.arrival.provider,
            attempts=self.attempt,
            prefill_chunks=times.chunks,
            queue_s=_seconds(self.received_ns, self.asked_ns) + queued,
            prefill_s=computing,
            exposed_transfer_s=waited - queued - computing,
            first_step_s=_seconds(self.arrival.arrived_ns, self.first_token_ns),
            writes=self.arrival.writes,
            bytes=self.arrival.bytes,
            early_writes=times.early_writes,
            last_chunk_writes=times.last_chunk_writes,
        )


def _seconds(start_ns: int, end_ns: int) -> float:
    """0 unless both happened."""
    return max(0, end_ns - start_ns) / 1e9 if start_ns and end_ns else 0.0
