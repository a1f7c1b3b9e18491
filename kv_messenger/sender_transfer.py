"""The prefill side of one transfer attempt, as a pure state machine.

    QUEUED --first chunk--> SENDING --last chunk--> LAST_ARMED --all ended, forward ended--> FINISHED
       `----------------------+------------------------'--abort, failure--> STOPPED --all ended--> (released)

Source pages stay pinned until every batch has ended, also on error paths: `ReleaseSource` comes exactly once.
`Stopped` is sent as soon as no more writes can be posted, which may be before the posted ones have completed. The
context is there once the last chunk's forward has ended, and goes then.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from fabric.api import PageWrites, WritesEnded
from kv_messenger.plan import LayerWrites, TransferPlan
from kv_messenger.runs import RunCursor
from protocol.messages import Failure, PrefillTimes
from protocol.ticket import TransferKey


class SenderState(Enum):
    QUEUED = "queued"
    SENDING = "sending"
    LAST_ARMED = "last armed"
    FINISHED = "finished"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Chunk:
    """What the engine announces before a forward: token range [start, end), the prompt's block table in each group of
    layers, and the progress word's value once layer 0 of that forward is done (layer l: `first_threshold + l`).
    `context_slot`: where the last chunk's forward leaves the context, if anywhere."""

    start: int
    end: int
    tables: Sequence[Sequence[int]]
    first_threshold: int
    context_slot: int | None = None


@dataclass(frozen=True, slots=True)
class Arm:
    """Post `writes` once the progress word reaches `threshold` (None: now). `layer`: the model's; the context
    comes behind them all, as if it were one more."""

    layer: int
    threshold: int | None
    writes: PageWrites


@dataclass(frozen=True, slots=True)
class StopPosting:
    """Stop the engine's work for it, cancel every batch in `handles`, then call `on_cancelled` with the totals."""

    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReportStopped:
    posted: int
    completed: int
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class ReportFinished:
    posted: int
    times: PrefillTimes


@dataclass(frozen=True, slots=True)
class ReleaseSource:
    """No write reads the source pages, or the context, any more."""


Action = Arm | StopPosting | ReportStopped | ReportFinished | ReleaseSource


@dataclass(slots=True)
class SenderTransfer:
    """`received_ns`: monotonic, when the request came in. `deadline`: monotonic seconds."""

    key: TransferKey
    plan: TransferPlan
    received_ns: int
    deadline: float
    state: SenderState = SenderState.QUEUED
    tables: Sequence[Sequence[int]] = ()
    context_slot: int | None = None
    posted: int = 0
    completed: int = 0
    chunks: int = 0
    stop_failure: Failure | None = None
    released: bool = False
    _cursors: list[RunCursor] = field(init=False)
    _unarmed: deque[bool] = field(default_factory=deque)
    """of each batch that is still to be armed, whether it holds pages that are due with the prompt's last chunk"""
    _broken: bool = False
    """A write failed: whoever heard of it calls `stop`; until then this must not look finished."""
    _forwards_ended: int = 0
    _context_sent: bool = False
    _open: dict[int, bool] = field(default_factory=dict)
    """handle of each batch that has not ended -> whether it holds pages that are due with the prompt's last chunk"""
    _last_chunk_posts: list[tuple[int, int]] = field(default_factory=list)
    """(last_posted_ns, writes) of each batch of the last chunk"""
    _first_started_ns: int = 0
    _last_ended_ns: int = 0

    def __post_init__(self) -> None:
        self._cursors = self.plan.cursors()

    @property
    def live(self) -> bool:
        return self.state in (SenderState.QUEUED, SenderState.SENDING, SenderState.LAST_ARMED)

    def on_chunk(self, chunk: Chunk) -> list[Action]:
        """What is complete already (from the prefill side's own cache) goes now, what this forward completes goes layer
        by layer."""
        if not self.live:
            return []
        self.chunks += 1
        self.tables, self.context_slot = chunk.tables, chunk.context_slot
        self.state = SenderState.LAST_ARMED if chunk.end >= self.plan.tokens else SenderState.SENDING
        held, fresh = self._take(chunk.start), self._take(chunk.end)
        arms = [Arm(layer, None, writes) for layer, writes in held]
        arms += [Arm(layer, chunk.first_threshold + layer, writes) for layer, writes in fresh]
        self._unarmed += [self.state is SenderState.LAST_ARMED] * len(arms)
        return list(arms)

    def on_armed(self, handle: int) -> None:
        """The fabric took a batch; called for every Arm, in order, unless the transfer stopped meanwhile."""
        self._open[handle] = self._unarmed.popleft()

    def on_forward_ended(self, started_ns: int, ended_ns: int) -> list[Action]:
        self._first_started_ns = self._first_started_ns or started_ns
        self._last_ended_ns = ended_ns
        self._forwards_ended += 1
        return self._send_context() or self._finish_if_done()

    def on_batch_ended(self, event: WritesEnded) -> list[Action]:
        last_chunk = self._open.pop(event.handle, None)
        if last_chunk is None:
            return []
        self.completed += event.completed
        if self.live:
            self.posted += event.posted
        if last_chunk:
            self._last_chunk_posts.append((event.last_posted_ns, event.posted))
        self._broken |= event.error is not None
        return self._finish_if_done() if self.live else self._release_if_idle()

    def stop(self, failure: Failure | None) -> list[Action]:
        """Asked to stop (`failure` None), or something failed. A no-op once finished or stopped."""
        if not self.live:
            return []
        self.state = SenderState.STOPPED
        self.stop_failure = failure
        return [StopPosting(tuple(self._open))]

    def on_cancelled(self, posted: int, completed: int) -> list[Action]:
        """`posted` and `completed`: sums over the batches that were still open; nothing more will be posted."""
        self.posted += posted
        report = ReportStopped(self.posted, self.completed + completed, self.stop_failure)
        return [report, *self._release_if_idle()]

    def _take(self, computed: int) -> list[LayerWrites]:
        """The writes of what became complete, each handed out once."""
        return self.plan.writes([cursor.take(computed) for cursor in self._cursors], self.tables)

    def _send_context(self) -> list[Action]:
        """Once, when all of the prompt is computed."""
        computed = self.state is SenderState.LAST_ARMED and self._forwards_ended == self.chunks
        if not computed or self._context_sent or self._broken or not self.plan.target.context.parts:
            return []
        self._context_sent = True
        assert self.context_slot is not None, "an engine whose layout has a context computes one for every prompt"
        arms = [Arm(self.plan.source.layers, None, writes) for writes in self.plan.context_writes(self.context_slot)]
        self._unarmed += [False] * len(arms)
        return list(arms)

    def _finish_if_done(self) -> list[Action]:
        busy = self._open or self._unarmed or self._broken or self._forwards_ended < self.chunks
        if self.state is not SenderState.LAST_ARMED or busy:
            return []
        self.state = SenderState.FINISHED
        return [ReportFinished(self.posted, self._times()), *self._release_if_idle()]

    def _release_if_idle(self) -> list[Action]:
        if self._open or self.released:
            return []
        self.released = True
        return [ReleaseSource()]

    def _times(self) -> PrefillTimes:
        return PrefillTimes(
            chunks=self.chunks,
            queue_s=max(0, self._first_started_ns - self.received_ns) / 1e9,
            prefill_s=max(0, self._last_ended_ns - self._first_started_ns) / 1e9,
            early_writes=sum(n for posted_ns, n in self._last_chunk_posts if posted_ns <= self._last_ended_ns),
            last_chunk_writes=sum(n for _, n in self._last_chunk_posts),
        )
