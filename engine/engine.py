"""The engine: owns all requests and pages, and moves everything on by one step at a time.

One thread owns it (see `loop`); every method is for that thread, except where it says otherwise.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.allocators import FullAttentionCacheAllocator
from engine.cache_pool import CachePool
from engine.config import ContinuousBatchingConfig
from engine.errors import ForwardFailed, InvalidRequest, NoRoom, UnknownRequest
from engine.forward import ForwardPass, Sampled
from engine.limits import Limits
from engine.model_runner import Runner
from engine.outputs import Ended, EngineListener, NewToken, StepOutput
from engine.preemption import choose_victims
from engine.progress import ProgressWord
from engine.request import Owner, Request, RequestStatus
from engine.scheduler import FIFOScheduler, ScheduledRequest, SchedulerOutput
from protocol.layout import KVLayout
from protocol.messages import Failure, FailureCode, FinishReason

log = logging.getLogger(__name__)


@dataclass
class EngineCounters:
    """Monotone. `tokens`: generated. `stalls`: times that an active request got no blocks. `resets`: soft resets."""

    batches: int = 0
    tokens: int = 0
    stalls: int = 0
    resets: int = 0
    failed_batches: int = 0


class Engine:
    """`listener` may be set until the first step. Request ids are unique among the living; an id may come back once
    its terminal output was returned by `step`, or once it was released or quarantined."""

    def __init__(
        self,
        config: ContinuousBatchingConfig,
        pool: CachePool,
        runner: Runner,
        progress: ProgressWord,
        limits: Limits,
        listener: EngineListener | None = None,
    ) -> None:
        self.pool = pool
        self.progress = progress
        self.limits = limits
        self.listener = listener
        self.counters = EngineCounters()
        self._allocator = FullAttentionCacheAllocator(pool)
        self._scheduler = FIFOScheduler(config, self._allocator)
        self._forward_pass = ForwardPass(runner, self._allocator, progress)
        self._requests: dict[str, Request] = {}
        self._remote: dict[str, Request] = {}
        self._output = StepOutput()
        self._settled = True
        self._seeds = random.Random(config.seed)

    # ---- what it is: any thread ----

    @property
    def layout(self) -> KVLayout:
        return self.pool.geometry.layout()

    @property
    def max_context(self) -> int:
        return self.limits.max_context

    @property
    def pages_total(self) -> int:
        """In blocks: one page in every layer."""
        return self._allocator.total

    @property
    def pages_free(self) -> int:
        return self._allocator.free

    @property
    def pages_quarantined(self) -> int:
        return self._allocator.quarantined

    @property
    def running(self) -> int:
        return len(self._scheduler.active)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    def ledger(self) -> list[dict[str, Any]]:
        """The page ledger, one entry per block: block, state, owner, generation, age_s."""
        return [{**asdict(record), "state": record.state.value} for record in self._allocator.ledger()]

    # ---- requests that run here ----

    def validate(self, request: Request) -> None:
        """Raises InvalidRequest or CapacityExceeded, as `add` and `reserve` would."""
        if request.id in self._requests:
            raise InvalidRequest(f"request {request.id!r} is running already")
        if self._allocator.blocks(request.owner):
            raise InvalidRequest(f"request {request.id!r}: pages of attempt {request.attempt} are still in quarantine")
        self.limits.validate(request)

    def add(self, request: Request) -> None:
        """Queue it. Raises InvalidRequest or CapacityExceeded."""
        self.validate(request)
        if request.sampling.max_new_tokens == 0 and not request.prefill_only:
            request.status = RequestStatus.FINISHED
            self._output.ended.append(Ended(request.id, FinishReason.LENGTH, None, 0))
            return
        self._admit(request)
        self._scheduler.enqueue(request)

    def abort(self, request_id: str) -> None:
        """Stop it, in whatever state; unknown ids are ignored. Exactly one Ended(CANCELLED) comes with the next step.

        A prefill-only request stops being scheduled, keeps its blocks until `release`, and has no Ended.
        """
        request = self._requests.get(request_id)
        if request is None or request.is_terminal:
            return
        if request.prefill_only:
            self._retire(request, RequestStatus.CANCELLED)
        else:
            self._end(request, RequestStatus.CANCELLED, FinishReason.CANCELLED)

    def release(self, request_id: str) -> None:
        """Free the blocks of a prefill-only request: all writes from them have completed, or can no longer start.

        One that still runs is stopped. Unknown ids are ignored.
        """
        request = self._requests.get(request_id)
        if request is None or not request.prefill_only:
            return
        self._retire(request, RequestStatus.FINISHED)
        del self._requests[request_id]
        self._allocator.release(request.owner)

    # ---- requests whose prompt is computed elsewhere ----

    def can_reserve(self, prompt_tokens: int) -> bool:
        """Under the rules of admission: free blocks, safety margin, no reset request being held back."""
        return self._scheduler.may_reserve(prompt_tokens, busy=bool(self._scheduler.active or self._remote))

    def reserve(self, request: Request) -> list[int]:
        """Blocks for the whole prompt, in token order; the request waits until `resume`.

        Raises InvalidRequest, CapacityExceeded, or NoRoom when `can_reserve` says no.
        """
        self.validate(request)
        if not self.can_reserve(len(request.prompt)):
            raise NoRoom(f"request {request.id!r}: no room for {len(request.prompt)} tokens now")
        self._admit(request)
        self._scheduler.count_reservation()
        request.status = RequestStatus.WAITING_FOR_REMOTE_KV
        self._remote[request.id] = request
        self._allocator.grow(request.owner, len(request.prompt))
        return list(self._allocator.blocks(request.owner))

    def resume(self, request_id: str, computed: int) -> None:
        """KV of the first `computed` tokens is in its blocks: schedule the rest. Raises UnknownRequest."""
        request = self._remote.pop(request_id, None)
        if request is None:
            raise UnknownRequest(f"request {request_id!r} does not wait for KV")
        assert 0 <= computed < len(request.tokens), f"{computed} tokens computed of {len(request.tokens)}"
        self._settled = False
        request.computed = computed
        request.status = RequestStatus.DECODING if request.remaining == 1 else RequestStatus.PREFILLING
        if request.sampling.max_new_tokens == 0:
            self._end(request, RequestStatus.FINISHED, FinishReason.LENGTH)
        else:
            self._scheduler.activate(request)

    def quarantine(self, request_id: str) -> None:
        """It leaves the engine without an Ended; its blocks stay out of use, as somebody may still write to them.
        Unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._allocator.quarantine(request.owner)
        self._retire(request, RequestStatus.FAILED)

    def free_quarantined(self, request_id: str, attempt: int) -> None:
        """Nobody can write there any more. Unknown owners are ignored."""
        owner = Owner(request_id, attempt)
        if self._allocator.is_quarantined(owner):
            self._allocator.release(owner)
            self._settled = False

    # ---- the step ----

    @property
    def has_work(self) -> bool:
        """False when a step would do nothing: no request, or all that there are wait for others to act."""
        queued = self._scheduler.active or self._scheduler.waiting
        return bool(self._output) or (not self._settled and bool(queued))

    def step(self) -> StepOutput:
        """Schedule, run one forward, update. Raises for faults of the engine itself, never for those of a request."""
        scheduled = self._schedule()
        self._settled = not scheduled
        if scheduled:
            self._forward(scheduled)
        output, self._output = self._output, StepOutput()
        return output

    def check(self) -> None:
        """Assert what must hold between steps: each block in one place, and none held by nobody."""
        self._allocator.check()
        owners = {request.owner for request in self._requests.values()}
        stray = [owner for owner in self._allocator.holders() if owner not in owners]
        assert not stray, f"blocks held by requests that are gone: {stray}"

    # ---- inside a step ----

    def _schedule(self) -> list[ScheduledRequest]:
        """Make room until something can run, then for those that stalled beside it."""
        batch = self._scheduler.schedule()
        while batch.cache_full and self._make_room(batch):
            batch = self._scheduler.schedule()
        if batch.scheduled and batch.stalled:
            self._make_room(batch)
        return batch.scheduled

    def _make_room(self, batch: SchedulerOutput) -> bool:
        """Start the newest stalled requests over. False if nothing can be done: they wait for pages of others."""
        self.counters.stalls += len(batch.stalled)
        allocator = self._allocator
        victims = choose_victims(batch.stalled, allocator.free, len(self._scheduler.active))
        for request in victims:
            self._reset(request)
        if victims:
            return True
        outgrown = [s.request for s in batch.stalled if s.held + allocator.free == allocator.total]
        for request in outgrown:
            self._fail(request, FailureCode.CAPACITY, f"it outgrew the cache of {allocator.total} blocks")
        return bool(outgrown)

    def _reset(self, request: Request) -> None:
        """It will fit again: another active request holds a block, so this one's tokens need no more than the pool."""
        self.counters.resets += 1
        self._allocator.release(request.owner)
        self._scheduler.reset(request)
        log.info("soft reset of request %s at %d tokens", request.id, len(request.tokens))

    def _forward(self, scheduled: Sequence[ScheduledRequest]) -> None:
        try:
            sampled = self._forward_pass.run(scheduled, self.listener)
        except ForwardFailed as error:
            self.counters.failed_batches += 1
            for item in scheduled:
                self._fail(item.request, FailureCode.INTERNAL, str(error))
            return
        self.counters.batches += 1
        for item in scheduled:
            self._update(item.request, sampled)

    def _update(self, request: Request, sampled: Sampled) -> None:
        if request.id in sampled:
            self._append(request, sampled[request.id])
        elif request.remaining == 0:
            self._retire(request, RequestStatus.FINISHED)
            self._output.prefilled.append(request.id)

    def _append(self, request: Request, token: int | None) -> None:
        if token is None:
            self._fail(request, FailureCode.INTERNAL, "the model's output was not finite")
            return
        self._output.tokens.append(NewToken(request.id, request.generated, token))
        request.tokens.append(token)
        self.counters.tokens += 1
        reason = self.limits.finish_reason(request)
        if reason:
            self._end(request, RequestStatus.FINISHED, reason)

    # ---- how requests come and go ----

    def _admit(self, request: Request) -> None:
        seed = request.sampling.seed
        request.seed = self._seeds.getrandbits(63) if seed is None else seed
        self._requests[request.id] = request
        self._settled = False

    def _fail(self, request: Request, code: FailureCode, message: str) -> None:
        failure = Failure(code, f"request {request.id!r} failed: {message}"[:1000])
        self._end(request, RequestStatus.FAILED, FinishReason.ERROR, failure)

    def _end(
        self, request: Request, status: RequestStatus, reason: FinishReason, failure: Failure | None = None
    ) -> None:
        """The one terminal word. Blocks go back, but for those that somebody may be writing to or reading from."""
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            self._allocator.quarantine(request.owner)
        elif not request.prefill_only:
            self._allocator.release(request.owner)
        if not request.prefill_only:
            del self._requests[request.id]
        self._retire(request, status)
        self._output.ended.append(Ended(request.id, reason, failure, request.generated))

    def _retire(self, request: Request, status: RequestStatus) -> None:
        """Out of all queues; its blocks are the caller's matter."""
        request.status = status
        self._remote.pop(request.id, None)
        self._scheduler.remove(request)
        self._settled = False
