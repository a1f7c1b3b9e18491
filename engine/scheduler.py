"""Which requests run in the next forward, and how many tokens of each. Counts and lists only: no torch, no clock."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from engine.allocators import FullAttentionCacheAllocator
from engine.config import ContinuousBatchingConfig
from engine.preemption import StalledRequest
from engine.request import Request, RequestStatus


@dataclass(frozen=True)
class ScheduledRequest:
    """`count` tokens of the request, from `start` on."""

    request: Request
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass
class SchedulerOutput:
    """`stalled`: active requests that got no blocks, in scheduling order."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    stalled: list[StalledRequest] = field(default_factory=list)
    allocation_failed: bool = False

    @property
    def cache_full(self) -> bool:
        return not self.scheduled and self.allocation_failed


@dataclass
class _Budget:
    """What is left of one forward: query tokens, tokens of KV read back, requests."""

    tokens: int
    cache: int
    requests: int

    def spend(self, count: int, read: int) -> None:
        self.tokens -= count
        self.cache -= read
        self.requests -= 1

    @property
    def spent(self) -> bool:
        return self.tokens <= 0 or self.cache <= 0 or self.requests <= 0


class FIFOScheduler:
    """Active decodes first, then prompts under way, then waiting requests in order of arrival.

    Owns the two queues. `active` requests hold blocks and are in order of becoming active. After a soft reset no
    waiting request is considered until a request has left the engine, or nothing is active (`hold_admissions`).
    """

    def __init__(self, config: ContinuousBatchingConfig, allocator: FullAttentionCacheAllocator) -> None:
        self._config = config
        self._allocator = allocator
        self.active: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        self._admissions_held = False

    def enqueue(self, request: Request) -> None:
        """At the end of the waiting order."""
        self.waiting[request.id] = request

    def activate(self, request: Request) -> None:
        """At the end of the active order."""
        self.waiting.pop(request.id, None)
        self.active[request.id] = request

    def remove(self, request: Request) -> None:
        """It has left the engine: room may have come free, so waiting requests are considered again."""
        self.active.pop(request.id, None)
        self.waiting.pop(request.id, None)
        self._admissions_held = False

    def reset(self, request: Request) -> None:
        """Send an active request back to the end of the waiting order; the caller frees its blocks."""
        del self.active[request.id]
        request.soft_reset()
        self.enqueue(request)
        self._admissions_held = True

    def schedule(self) -> SchedulerOutput:
        """Takes blocks and sets statuses; `Request.computed` is the caller's, once it assembles the batch."""
        config, output = self._config, SchedulerOutput()
        passed: list[Request] = []
        budget = _Budget(config.max_batch_tokens, config.cache_tokens, config.request_cap)
        in_margin = self._in_margin()
        for request in self._candidates():
            waiting = request.id in self.waiting
            if not in_margin and output.scheduled and request.status is not RequestStatus.DECODING:
                break
            if waiting and self._queue_is_held(passed):
                break
            if not self._try(request, budget, output):
                passed += [request] if waiting else []
                continue
            if waiting:
                self._overtake(passed)
            if budget.spent:
                break
        return output

    def may_reserve(self, tokens: int, busy: bool) -> bool:
        """Whether a request from outside the queues may take blocks for `tokens` now, under the same rules as those
        inside. `busy`: something runs or holds a reservation already."""
        if self._admissions_are_held or self._queue_is_held(self.waiting.values()):
            return False
        return self._allocator.blocks_for(tokens) <= self._allocator.free and (self._in_margin() or not busy)

    def count_reservation(self) -> None:
        """Somebody from outside was let in ahead of all that wait."""
        self._overtake(self.waiting.values())

    def _candidates(self) -> Iterator[Request]:
        active = list(self.active.values())
        yield from (r for r in active if r.status is RequestStatus.DECODING)
        yield from (r for r in active if r.status is RequestStatus.PREFILLING)
        if not self._admissions_are_held:
            yield from list(self.waiting.values())

    def _try(self, request: Request, budget: _Budget, output: SchedulerOutput) -> bool:
        """Schedule one candidate if budget and blocks allow. Skipping it does not block those behind."""
        count = min(request.remaining, budget.tokens)
        if budget.cache < request.computed:
            return False
        if not self._take_blocks(request, request.computed + count):
            output.allocation_failed = True
            if request.id in self.active:
                output.stalled.append(self._stalled(request, request.computed + count))
            return False
        budget.spend(count, request.computed)
        self._mark_scheduled(request, count)
        output.scheduled.append(ScheduledRequest(request, request.computed, count))
        return True

    def _take_blocks(self, request: Request, tokens: int) -> bool:
        """A prefill-only request takes all of its blocks at admission, so that it can never stall."""
        wanted = len(request.tokens) if request.prefill_only else tokens
        if not self._allocator.can_grow(request.owner, wanted):
            return False
        self._allocator.grow(request.owner, wanted)
        return True

    def _stalled(self, request: Request, tokens: int) -> StalledRequest:
        held, missing = self._allocator.blocks(request.owner), self._allocator.missing(request.owner, tokens)
        return StalledRequest(request, len(held), missing)

    def _mark_scheduled(self, request: Request, count: int) -> None:
        ends = count == request.remaining and not request.prefill_only
        request.status = RequestStatus.DECODING if ends else RequestStatus.PREFILLING
        if request.id not in self.active:
            self.activate(request)

    @property
    def _admissions_are_held(self) -> bool:
        return self._admissions_held and bool(self.active)

    def _in_margin(self) -> bool:
        return self._allocator.free / self._allocator.total >= self._config.safety_margin

    def _queue_is_held(self, passed: Iterable[Request]) -> bool:
        return any(request.overtakes >= self._config.max_overtakes for request in passed)

    @staticmethod
    def _overtake(passed: Iterable[Request]) -> None:
        for request in passed:
            request.overtakes += 1
