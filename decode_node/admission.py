"""Which request runs, waits for KV, or is refused: the one owner of the node's request table.

Every method runs on the engine's thread, between steps. Pages of a failed or cancelled attempt are quarantined in the
engine at once and freed when the messenger says that no peer can write into them.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from decode_node.choices import Choices
from decode_node.job import Job, JobState
from decode_node.retries import final_failure, may_retry
from engine.engine import Engine, Reservation
from engine.errors import CapacityExceeded, InvalidRequest
from engine.outputs import StepOutput
from engine.request import Request
from kv_messenger.attempts import Arrival, Fetch
from protocol.gates import Gates
from protocol.logs import event
from protocol.messages import (
    DecodeRequest,
    Failure,
    FailureCode,
    FinishReason,
    Message,
    PrefillTimes,
    RequestEnded,
)
from protocol.ticket import TransferKey

log = logging.getLogger(__name__)


class KVSource(Protocol):
    """The messenger, as admission needs it; both calls return at once."""

    def fetch(self, fetch: Fetch) -> None: ...

    def abort(self, key: TransferKey, failure: Failure | None) -> None: ...


@dataclass
class AdmissionCounters:
    received: int = 0
    refused: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    tokens: int = 0


class Admission:
    """`reply` sends a message to the router; it may be called from this thread at any time. `local_prefill`: run
    prompts here, ask nobody."""

    def __init__(
        self,
        engine: Engine,
        source: KVSource,
        reply: Callable[[Message], None],
        gates: Gates,
        *,
        instance: str,
        name: str,
        local_prefill: bool,
        max_queue: int,
        target: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._source = source
        self._reply = reply
        self._gates = gates
        self._instance = instance
        self._name = name
        self._local_prefill = local_prefill
        self._max_queue = max_queue
        self._target = target
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._choices = Choices(reply)
        self._queue: deque[Job] = deque()
        self._at_join_gate: list[str] = []
        self.counters = AdmissionCounters()
        self.draining = False

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def jobs(self) -> int:
        return len(self._jobs)

    # ---- from the router ----

    def accept(self, request: DecodeRequest) -> None:
        self.counters.received += 1
        refusal = self._refusal(request)
        if refusal is not None:
            self._refuse(request, refusal)
            return
        deadline = self._clock() + request.deadline_s
        job = Job(request, time.monotonic_ns(), deadline, list(request.prefills), attempt=request.attempts)
        self._jobs[job.id] = job
        self._choices.open(job)
        self._queue.append(job)
        event(log, "request accepted", request=job.id, public_id=request.public_id, tokens=len(request.prompt))
        self.admit()

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """A choice by itself can be told from the others once the request has tokens."""
        job = self._jobs.get(request_id)
        if job is None:
            return
        if choice is None:
            self._stop(job, FinishReason.CANCELLED, None)
            self.admit()
        elif job.first_token_ns and choice in job.living:
            self._engine.abort(job.living[choice])

    def abort_all(self) -> None:
        """The router is gone: nobody waits for any of it."""
        for job in list(self._jobs.values()):
            self._stop(job, FinishReason.CANCELLED, None)

    def start_draining(self) -> None:
        """Take nothing new."""
        self.draining = True

    def end_all(self) -> None:
        """The node is going down."""
        self.draining = True
        self.abort_all()

    # ---- from the messenger ----

    def kv_arrived(self, arrival: Arrival) -> None:
        job = self._current(arrival.key)
        if job is None:
            return
        job.arrival = arrival
        self._join(job)
        self.admit()  # its context slot has come free

    def kv_failed(self, key: TransferKey, failure: Failure) -> None:
        job = self._current(key)
        if job is None:
            return
        self._give_up_pages(job)
        job.failures.add(failure.code)
        if not self.draining and may_retry(job, failure):
            self.counters.retried += 1
            job.state = JobState.QUEUED
            self._queue.appendleft(job)
        else:
            self._end(job, FinishReason.ERROR, final_failure(job, failure))
        self.admit()

    def pages_safe(self, key: TransferKey) -> None:
        job = self._current(key)
        if job is not None:
            job.safe.add(key.attempt)
        else:
            self._engine.free_quarantined(key.request, key.attempt)
            self.admit()

    def prefill_timed(self, key: TransferKey, times: PrefillTimes) -> None:
        job = self._jobs.get(key.request)
        if job is not None and job.attempt == key.attempt:
            job.times = times

    # ---- from the engine ----

    def on_step(self, output: StepOutput) -> None:
        now = time.monotonic_ns()
        for new in output.tokens:
            job = self._choices.pass_on(new)
            if job is not None:
                job.first_token_ns = job.first_token_ns or now
                job.tokens += 1
                self.counters.tokens += 1
        for ended in output.ended:
            job = self._choices.end(ended)
            if job is not None:
                self._end(job, ended.reason, ended.failure)
        if output.ended:
            self.admit()

    # ---- from the clock and the tests ----

    def on_tick(self) -> None:
        now = self._clock()
        for job in [job for job in self._jobs.values() if now >= job.deadline]:
            self._stop(job, FinishReason.ERROR, Failure(FailureCode.DEADLINE, "the request's deadline passed"))
        self.admit()

    def on_gate_released(self) -> None:
        joining, self._at_join_gate = self._at_join_gate, []
        for request_id in joining:
            job = self._jobs.get(request_id)
            if job is not None and job.state is JobState.WAITING_FOR_KV:
                self._join(job)

    # ---- inside ----

    def admit(self) -> None:
        """Start queued requests, first come first served, while pages last."""
        while self._queue and self._start(self._queue[0]):
            self._queue.popleft()

    def _start(self, job: Job) -> bool:
        """False if there is no room now. An impossible request is ended, which counts as started."""
        prompt = job.request.prompt
        local = self._local_prefill or len(prompt) == 1
        request = job.next_request()
        if not local and not self._engine.can_reserve(request):
            return False
        job.begin_attempt()
        try:
            if local:
                self._run_here(job, request)
            else:
                self._fetch(job, self._engine.reserve(request))
        except InvalidRequest as error:
            self._end(job, FinishReason.ERROR, Failure(FailureCode.INVALID, str(error)[:1000]))
        except CapacityExceeded as error:
            self._end(job, FinishReason.ERROR, Failure(FailureCode.TOO_LONG, str(error)[:1000]))
        return True

    def _run_here(self, job: Job, request: Request) -> None:
        self._engine.add(request)
        job.state, job.started_ns = JobState.RUNNING, time.monotonic_ns()

    def _fetch(self, job: Job, reservation: Reservation) -> None:
        """Ask for the pages that are not here already; with all of them here, nobody is asked."""
        tokens, layout, cached = job.request.prompt[:-1], self._engine.layout, reservation.cached
        job.computed = cached * layout.page_size if reservation.whole else len(tokens)
        if reservation.whole:
            job.state = JobState.WAITING_FOR_KV
            job.safe.add(job.attempt)
            self._join(job)
            return
        job.peer = job.untried.pop(0)
        job.state, job.asked_ns = JobState.WAITING_FOR_KV, time.monotonic_ns()
        remaining = max(0.0, job.deadline - self._clock())
        self._source.fetch(
            Fetch(
                key=job.key(self._instance),
                public_id=job.request.public_id,
                peer=job.peer,
                tokens=tokens,
                tables=[t[cached : layout.pages_for(g, len(tokens))] for g, t in enumerate(reservation.tables)],
                first_page=cached,
                deadline_s=remaining,
                target=self._target,
                context_slot=reservation.context_slot,
            )
        )

    def _join(self, job: Job) -> None:
        if self._gates.held("decode:join"):
            self._at_join_gate.append(job.id)
            return
        job.state, job.started_ns = JobState.RUNNING, time.monotonic_ns()
        self._engine.resume(job.id, job.computed)

    def _current(self, key: TransferKey) -> Job | None:
        """The job, if this attempt still holds its pages and waits for them."""
        job = self._jobs.get(key.request)
        if job is None or job.attempt != key.attempt or job.state is not JobState.WAITING_FOR_KV:
            return None
        return job

    def _refusal(self, request: DecodeRequest) -> Failure | None:
        if self.draining:
            return Failure(FailureCode.DRAINING, "this decode node is stopping")
        if request.request in self._jobs:
            return Failure(FailureCode.INVALID, "a request with this key is running already")
        if len(self._queue) >= self._max_queue:
            return Failure(FailureCode.OVERLOADED, f"{len(self._queue)} requests wait for pages already")
        if not request.prefills and not self._local_prefill and len(request.prompt) > 1:
            return Failure(FailureCode.NO_PREFILL, "no prefill node is available")
        try:
            self._engine.validate(Request(request.request, request.prompt, request.sampling, n=request.n))
        except InvalidRequest as error:
            return Failure(FailureCode.INVALID, str(error)[:1000])
        except CapacityExceeded as error:
            return Failure(FailureCode.TOO_LONG, str(error)[:1000])
        return None

    def _refuse(self, request: DecodeRequest, failure: Failure) -> None:
        self.counters.refused += 1
        event(log, "request refused", logging.WARNING, request=request.request, reason=failure.message)
        ledger = Job(request, 0, 0.0, [], attempt=request.attempts).ledger(self._name)
        self._reply(
            RequestEnded(request=request.request, reason=FinishReason.ERROR, tokens=0, failure=failure, ledger=ledger)
        )

    def _stop(self, job: Job, reason: FinishReason, failure: Failure | None) -> None:
        """End a request from our side, whatever it is doing."""
        if job.state is JobState.QUEUED:
            self._queue.remove(job)
        elif job.state is JobState.WAITING_FOR_KV:
            self._source.abort(job.key(self._instance), failure)
            self._give_up_pages(job)
        self._end(job, reason, failure)

    def _give_up_pages(self, job: Job) -> None:
        """Out of the engine and into quarantine; straight on to free if they are known to be safe."""
        self._engine.quarantine(job.id)
        if job.attempt in job.safe:
            self._engine.free_quarantined(job.id, job.attempt)

    def _end(self, job: Job, reason: FinishReason, failure: Failure | None) -> None:
        """Whatever of it the engine still runs stops."""
        del self._jobs[job.id]
        for name in self._choices.close(job):
            self._engine.abort(name)
        if reason is FinishReason.CANCELLED:
            self.counters.cancelled += 1
        elif reason is FinishReason.ERROR:
            self.counters.failed += 1
        else:
            self.counters.finished += 1
        ledger = job.ledger(self._name)
        why = failure.message if failure else None
        event(log, "request ended", request=job.id, outcome=reason.value, tokens=job.tokens, reason=why)
        self._reply(RequestEnded(request=job.id, reason=reason, tokens=job.tokens, failure=failure, ledger=ledger))
