"""Which requests run in the next forward, and how many tokens of each. Counts and lists only: no torch, no clock."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.cache_manager import CacheManager
from engine.config import ContinuousBatchingConfig
from engine.preemption import StalledRequest
from engine.prefix_lookup import PrefixLookup
from engine.request import Request, RequestStatus
from engine.waiting import WaitingQueue

DECODING, PREFILLING = RequestStatus.DECODING, RequestStatus.PREFILLING


@dataclass(slots=True)  # not frozen: one is made for every token, and freezing triples its cost
class ScheduledRequest:
    """`length` tokens of the request, from `start` on: 0 where all of a prompt was found in the cache."""

    request: Request
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass
class SchedulerOutput:
    """`stalled`: active requests that got no blocks, in scheduling order. `restored`: scheduled requests whose KV must
    come back from host memory before the forward."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    stalled: list[StalledRequest] = field(default_factory=list)
    restored: list[Request] = field(default_factory=list)
    allocation_failed: bool = False

    @property
    def cache_full(self) -> bool:
        return not self.scheduled and self.allocation_failed


@dataclass(slots=True)
class _Budget:
    """What is left of one forward: query tokens, tokens of KV read back, requests. As long as there are only decodes,
    models without sliding layers read KV through block tables, at no cost: then `reads_are_free`. `in_margin`: so many
    blocks are free that prompts may run beside others."""

    tokens: int
    cache: int
    requests: int
    reads_are_free: bool
    in_margin: bool

    def spend_on_prompt(self, count: int, read: int) -> None:
        self.tokens -= count
        self.cache -= read
        self.requests -= 1
        self.reads_are_free = False

    def spend_on_decodes(self, count: int, cache_left: int) -> None:
        self.tokens -= count
        self.requests -= count
        self.cache = cache_left

    @property
    def spent(self) -> bool:
        return self.tokens <= 0 or self.requests <= 0 or (self.cache <= 0 and not self.reads_are_free)


class Scheduler(ABC):
    """Owns the two queues. `active` requests hold blocks and are in order of becoming active. After an offload or soft
    reset no waiting request is considered until a request has left the engine, or nothing is active."""

    def __init__(self, config: ContinuousBatchingConfig, cache: CacheManager, lookup: PrefixLookup) -> None:
        geometry = cache.pool.geometry
        self._batch_tokens, self._request_cap = config.batch_tokens, config.request_cap
        self._cache_tokens = geometry.cache_tokens(cache.pool.num_chunks)
        self._margin, self._max_overtakes = config.margin, config.max_overtakes
        self._is_full = geometry.is_full
        self._window = _only_window(cache)
        self._cache = cache
        self._lookup = lookup
        self.active: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.started: list[str] = []
        """Ids of those that became active for the first time, for whoever takes them away."""
        self._admissions_held = False

    @abstractmethod
    def _run_active(
        self, decodes: Sequence[Request], prompts: Sequence[Request], budget: _Budget, output: SchedulerOutput
    ) -> None:
        """`_decode` and `_prefill`, in the order of this scheduler."""

    # ---- the queues ----

    def enqueue(self, request: Request) -> None:
        """At the end of its priority's waiting order."""
        self.waiting.append(request)

    def activate(self, request: Request) -> None:
        """At the end of the active order."""
        self.waiting.discard(request)
        self.active[request.id] = request
        request.overtakes = 0
        if not request.started:
            request.started = True
            self.started.append(request.id)

    def remove(self, request: Request) -> None:
        """It has left the engine: room may have come free, so waiting requests are considered again."""
        if self.active.get(request.id) is request:
            del self.active[request.id]
        self.waiting.discard(request)
        self._admissions_held = False

    def send_back(self, request: Request) -> None:
        """From active to the end of the waiting order, as it has to make room."""
        del self.active[request.id]
        request.status = RequestStatus.PENDING
        self.enqueue(request)
        self._admissions_held = True

    def start_over(self, request: Request) -> None:
        """An active one that holds no blocks any more is prefilled anew, without waiting."""
        assert request.id in self.active
        request.status = PREFILLING
        self._admissions_held = True

    # ---- the choice ----

    def schedule(self) -> SchedulerOutput:
        """Takes blocks and sets statuses; `Request.computed` is the caller's, once it assembles the batch, except where
        a cached prefix was attached."""
        self._cache.recycle()
        output = SchedulerOutput()
        budget = _Budget(self._batch_tokens, self._cache_tokens, self._request_cap, self._is_full, self._in_margin())
        self._run_active(self._active_in(DECODING), self._active_in(PREFILLING), budget, output)
        if not (budget.spent or self._admissions_are_held):
            self._admit(budget, output)
        return output

    def may_reserve(self, request: Request, hits: Sequence[int], busy: bool) -> bool:
        """Whether a request from outside the queues may take blocks for its prompt now, under the same rules as those
        inside. `hits`: cached blocks that it begins with. `busy`: something runs or holds a reservation already."""
        if self._admissions_are_held or self._queue_is_held(self.waiting):
            return False
        wanted = self._cache.wants_context(request)
        if not self._cache.can_hold(request.owner, len(request.prompt), hits, wanted):
            return False
        return not busy or self._in_margin()

    def count_reservation(self) -> None:
        """Somebody from outside was let in ahead of all that wait."""
        self._overtake(self.waiting)

    # ---- inside ----

    def _decode(self, requests: Iterable[Request], budget: _Budget, output: SchedulerOutput) -> None:
        """One token of each, as far as budgets and blocks allow. Runs once a token: what it does for each is spelt
        out."""
        scheduled, before = output.scheduled, len(output.scheduled)
        room, cache, reads_are_free = min(budget.tokens, budget.requests), budget.cache, budget.reads_are_free
        window = self._window
        for request in requests:
            if room <= 0 or (cache <= 0 and not reads_are_free):
                break
            computed = request.computed
            read = computed if window is None or computed < window else window
            if read > cache and not reads_are_free:
                continue
            if request.unknown and computed + 1 >= request.token_limit:
                continue  # the token that is being sampled will be its last one
            if computed >= request.capacity and not self._grow(request, computed + 1, output):
                continue
            cache -= read
            room -= 1
            scheduled.append(ScheduledRequest(request, computed, 1))
        budget.spend_on_decodes(len(scheduled) - before, cache)

    def _prefill(self, requests: Iterable[Request], budget: _Budget, output: SchedulerOutput) -> None:
        """Tokens of prompts under way, as many as budgets and blocks allow. Outside the margin one runs only if nothing
        else does."""
        for request in requests:
            if budget.spent or (output.scheduled and not budget.in_margin):
                return
            self._try(request, budget, output)

    def _admit(self, budget: _Budget, output: SchedulerOutput) -> None:
        """Waiting requests; one that does not fit does not block those behind, but for a bounded number of times. No
        more are passed over than a forward may hold: looking at a long queue in vain would cost every step."""
        passed: list[Request] = []
        for request in self.waiting:
            if (output.scheduled and not budget.in_margin) or len(passed) >= self._request_cap:
                return
            if passed and passed[-1].overtakes >= self._max_overtakes:
                return
            if not self._try_waiting(request, budget, output):
                passed.append(request)
                continue
            self._overtake(passed)
            if budget.spent or self._queue_is_held(passed):
                return

    def _try_waiting(self, request: Request, budget: _Budget, output: SchedulerOutput) -> bool:
        hits = () if request.offloaded else self._lookup.hits(request)
        request.computed += len(hits) * self._cache.pool.geometry.page_size
        if not self._try(request, budget, output, hits):
            request.computed -= len(hits) * self._cache.pool.geometry.page_size
            return False
        self._lookup.count(request, hits)
        self.activate(request)
        if request.offloaded:
            request.offloaded = False
            output.restored.append(request)
        return True

    def _try(self, request: Request, budget: _Budget, output: SchedulerOutput, hits: Sequence[int] = ()) -> bool:
        """Schedule one candidate that does not decode yet, if budgets and blocks allow."""
        if not _may_run(request):
            return False
        computed, remaining = request.computed, request.remaining
        count = min(remaining - 1 if request.unborn else remaining, budget.tokens)
        read = computed if self._window is None else min(computed, self._window)
        if read > budget.cache or not self._grow(request, computed + count, output, hits):
            return False
        budget.spend_on_prompt(count, read)
        request.status = DECODING if count == remaining and not request.prefill_only else PREFILLING
        output.scheduled.append(ScheduledRequest(request, computed, count))
        return True

    def _grow(self, request: Request, tokens: int, output: SchedulerOutput, hits: Sequence[int] = ()) -> bool:
        """Whether its blocks hold so many tokens, now or after taking some more."""
        if tokens <= request.capacity or self._take_blocks(request, tokens, hits):
            return True
        self._note_failure(request, tokens, output)
        return False

    def _take_blocks(self, request: Request, tokens: int, hits: Sequence[int]) -> bool:
        """A prefill-only request takes all of its blocks at admission, so that it can never stall, and a slot for its
        context where one is wanted."""
        context = False
        if request.prefill_only:
            tokens, context = len(request.tokens), self._cache.wants_context(request)
        if not self._cache.can_hold(request.owner, tokens, hits, context):
            return False
        holding = self._cache.hold(request.owner, tokens, hits, context)
        request.capacity, request.tables = holding.capacity, holding.tables
        return True

    def _note_failure(self, request: Request, tokens: int, output: SchedulerOutput) -> None:
        output.allocation_failed = True
        if request.id in self.active:
            held, missing = self._cache.sole_blocks(request.owner), self._cache.missing_blocks(request.owner, tokens)
            output.stalled.append(StalledRequest(request, tuple(held), tuple(missing)))

    def _active_in(self, status: RequestStatus) -> list[Request]:
        """In order of becoming active."""
        return [request for request in self.active.values() if request.status is status]

    @property
    def _admissions_are_held(self) -> bool:
        return self._admissions_held and bool(self.active)

    def _in_margin(self) -> bool:
        return self._cache.free_fraction >= self._margin

    def _queue_is_held(self, passed: Iterable[Request]) -> bool:
        return any(request.overtakes >= self._max_overtakes for request in passed)

    @staticmethod
    def _overtake(passed: Iterable[Request]) -> None:
        for request in passed:
            request.overtakes += 1


class FIFOScheduler(Scheduler):
    """Active decodes first, then prompts under way, then waiting requests in order of arrival."""

    def _run_active(
        self, decodes: Sequence[Request], prompts: Sequence[Request], budget: _Budget, output: SchedulerOutput
    ) -> None:
        self._decode(decodes, budget, output)
        self._prefill(prompts, budget, output)


class PrefillFirstScheduler(Scheduler):
    """Prompts under way first, then active decodes, then waiting requests in order of arrival."""

    def _run_active(
        self, decodes: Sequence[Request], prompts: Sequence[Request], budget: _Budget, output: SchedulerOutput
    ) -> None:
        self._prefill(prompts, budget, output)
        self._decode(decodes, budget, output)


SCHEDULERS: dict[str, type[Scheduler]] = {"fifo": FIFOScheduler, "prefill_first": PrefillFirstScheduler}


def _may_run(request: Request) -> bool:
    """While a token of it is still being sampled, it runs on only if its limit does not make that its last one."""
    if request.unborn and request.remaining == 1:
        return False
    return not request.unknown or len(request.tokens) + request.unknown < request.token_limit


def _only_window(cache: CacheManager) -> int | None:
    """Of a model with sliding layers alone: no more than that is ever read back."""
    windows = [group.window for group in cache.pool.geometry.groups]
    return windows[0] if len(windows) == 1 else None
