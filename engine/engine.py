"""The engine: owns all requests and pages, and moves everything on by one step at a time.

One thread owns it (see `loop`); every method is for that thread, except where it says otherwise.
"""

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from engine.cache_manager import CacheManager, Holding
from engine.cache_pool import CachePool
from engine.config import ContinuousBatchingConfig
from engine.counters import EngineCounters
from engine.errors import ForwardFailed, InvalidRequest, NoRoom, UnknownRequest
from engine.forking import Forking, child_of
from engine.forward import ForwardPass, InFlight, Outcome
from engine.ledger import check, ledger
from engine.limits import Limits
from engine.offload import OffloadStore
from engine.outputs import Ended, EngineListener, NewToken, StepOutput
from engine.prefix_cache import PrefixCache
from engine.prefix_lookup import PrefixLookup
from engine.progress import ProgressWord
from engine.request import Owner, Request, RequestStatus
from engine.room import RoomMaker
from engine.runner import Runner, SampledToken
from engine.scheduler import SCHEDULERS, ScheduledRequest, SchedulerOutput
from protocol.layout import KVLayout
from protocol.messages import Failure, FailureCode, FinishReason

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """What an engine is put together from (see `build`). `host_pool`: memory for the KV of requests that had to make
    room; None: they are computed anew. `asynchronous`: schedule the next forward while one runs. `namespace`: whatever
    changes KV besides the tokens; goes into the hashes of cached prefixes."""

    pool: CachePool
    runner: Runner
    progress: ProgressWord
    limits: Limits
    host_pool: CachePool | None = None
    asynchronous: bool = False
    namespace: str = ""


class Reservation(NamedTuple):
    """`blocks`: for the whole prompt, in token order. The first `cached` of them hold their KV already and are shared:
    nobody may write to them."""

    blocks: list[int]
    cached: int


class Engine:
    """`listener` may be set until the first step. Request ids are unique among the living; an id may come back once
    its terminal output was returned by `step`, or once it was released or quarantined."""

    def __init__(
        self, config: ContinuousBatchingConfig, parts: EngineParts, listener: EngineListener | None = None
    ) -> None:
        self.config = config
        self.pool = parts.pool
        self.progress = parts.progress
        self.limits = parts.limits
        self.listener = listener
        self.counters = EngineCounters()
        self.prefix = _prefix_cache(config, parts)
        self._runner = parts.runner
        self._asynchronous = parts.asynchronous
        self._cache = CacheManager(parts.pool, self.prefix)
        self._lookup = PrefixLookup(self._cache)
        self._scheduler = SCHEDULERS[config.scheduler_type](config, self._cache, self._lookup)
        store = OffloadStore(self._cache, parts.host_pool) if parts.host_pool else None
        self._room = RoomMaker(self._cache, self._scheduler, store, self.counters)
        self._forking = Forking(self._cache, self._scheduler, self.counters)
        self._forward_pass = ForwardPass(parts.runner, self._cache, parts.progress)
        self._flight: InFlight | None = None
        self._requests: dict[str, Request] = {}
        self._remote: dict[str, Request] = {}
        self._output = StepOutput()
        self._settled = True
        self._seeds = random.Random(config.seed)

    def close(self) -> None:
        """Waits for a forward under way; the runner ends."""
        if self._flight:
            self._take_in_flight()
        self._runner.close()

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
        return self._cache.total

    @property
    def pages_free(self) -> int:
        """Cached ones are among them: they are taken when room is needed."""
        return self._cache.free

    @property
    def pages_cached(self) -> int:
        """Free, but holding a prefix that may be hit."""
        return self.prefix.initialised if self.prefix else 0

    @property
    def pages_quarantined(self) -> int:
        return self._cache.quarantined

    @property
    def running(self) -> int:
        return len(self._scheduler.active)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    def ledger(self) -> list[dict[str, Any]]:
        """The page ledger, one entry per use of a block: block, state, owner, generation, age_s."""
        return [{**asdict(record), "state": record.state.value} for record in ledger(self._cache)]

    # ---- requests that run here ----

    def validate(self, request: Request) -> None:
        """Raises InvalidRequest or CapacityExceeded, as `add` and `reserve` would."""
        for name in (request.id, *request.child_ids()):
            if name in self._requests:
                raise InvalidRequest(f"request {name!r} is running already")
        if self._cache.holds(request.owner):
            raise InvalidRequest(f"request {request.id!r}: pages of attempt {request.attempt} are still in quarantine")
        if request.prefill_only and self._asynchronous:
            raise InvalidRequest(f"request {request.id!r}: prefill-only requests need synchronous batching")
        self.limits.validate(request)

    def add(self, request: Request) -> None:
        """Queue it. Raises InvalidRequest or CapacityExceeded."""
        self.validate(request)
        self._admit(request)
        if len(request.prompt) == 1 or request.sampling.max_new_tokens == 0:
            family = [request, *(child_of(request, i) for i in range(1, request.n))]
        else:
            family, request.unborn = [request], request.child_ids()
            self._requests.update(dict.fromkeys(request.unborn, request))
        for member in family:
            self._requests[member.id] = member
            self._queue(member)

    def abort(self, request_id: str) -> None:
        """Stop it, in whatever state; unknown ids are ignored. Exactly one Ended(CANCELLED) comes with the next step;
        one for each child that was not forked off yet, too.

        A prefill-only request stops being scheduled, keeps its blocks until `release`, and has no Ended.
        """
        request = self._requests.get(request_id)
        if request is None or request.is_terminal:
            return
        if request.prefill_only:
            self._retire(request, RequestStatus.CANCELLED)
        elif request_id != request.id:
            self._forking.give_up(request, request_id)
            self._end_unborn(request_id, FinishReason.CANCELLED, None)
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
        self._cache.release(request.owner)

    # ---- requests whose prompt is computed elsewhere ----

    def can_reserve(self, request: Request) -> bool:
        """Under the rules of admission: free blocks, safety margin, no reset request being held back."""
        busy = bool(self._scheduler.active or self._remote)
        return self._scheduler.may_reserve(request, self._lookup.hits(request), busy)

    def reserve(self, request: Request) -> Reservation:
        """Blocks for the whole prompt; the request waits until `resume`.

        Raises InvalidRequest, CapacityExceeded, or NoRoom when `can_reserve` says no.
        """
        self.validate(request)
        if not self.can_reserve(request):
            raise NoRoom(f"request {request.id!r}: no room for {len(request.prompt)} tokens now")
        hits = self._lookup.hits(request)
        self._admit(request)
        self._scheduler.count_reservation()
        self._lookup.count(request, hits)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KV
        self._remote[request.id] = request
        self._cache.hold(request.owner, len(request.prompt), hits)
        return Reservation(list(self._cache.tables(request.owner)[0]), len(hits))

    def resume(self, request_id: str, computed: int) -> None:
        """KV of the first `computed` tokens is in its blocks: schedule the rest. Raises UnknownRequest."""
        request = self._remote.pop(request_id, None)
        if request is None:
            raise UnknownRequest(f"request {request_id!r} does not wait for KV")
        assert 0 <= computed < len(request.tokens), f"{computed} tokens computed of {len(request.tokens)}"
        self._settled = False
        request.computed = computed
        self._register(request, 0, computed)
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
        self._cache.quarantine(request.owner)
        self._retire(request, RequestStatus.FAILED)

    def free_quarantined(self, request_id: str, attempt: int) -> None:
        """Nobody can write there any more. Unknown owners are ignored."""
        owner = Owner(request_id, attempt)
        if self._cache.is_quarantined(owner):
            self._cache.release(owner)
            self._settled = False

    # ---- the step ----

    @property
    def has_work(self) -> bool:
        """False when a step would do nothing: no request, or all that there are wait for others to act."""
        queued = self._scheduler.active or len(self._scheduler.waiting)
        return bool(self._output) or self._flight is not None or (not self._settled and bool(queued))

    def step(self) -> StepOutput:
        """Schedule, run one forward, update. Raises for faults of the engine itself, never for those of a request.

        Asynchronously, the forward that is updated from is the one launched by the step before.
        """
        scheduled = self._schedule()
        self._settled = not scheduled and self._flight is None
        flight = self._launch(scheduled)
        if self._asynchronous:
            flight, self._flight = self._flight, flight
        if flight:
            self._take_in(flight)
        return self._hand_over()

    def check(self) -> None:
        """Assert what must hold between steps: each block in one place, and none held by nobody."""
        check(self._cache)
        owners = {request.owner for request in self._requests.values()}
        stray = [h.owner for h in self._cache.holdings() if h.state is h.state.HELD and h.owner not in owners]
        assert not stray, f"blocks held by requests that are gone: {stray}"
        leaving = [h for h in self._cache.holdings() if h.state is h.state.LEAVING]
        assert leaving == (self._flight.parked if self._flight else []), "blocks wait for no forward under way"

    # ---- inside a step ----

    def _schedule(self) -> Sequence[ScheduledRequest]:
        """Make room until something can run, then for those that stalled beside it."""
        began = time.monotonic_ns()
        output = self._scheduler.schedule()
        while output.cache_full and self._make_room(output):
            output = self._scheduler.schedule()
        if output.scheduled and output.stalled:
            self._make_room(output)
        self._room.restore(output)
        for request in output.restored:
            self._register(request, 0, request.computed)
        self.counters.schedule_ns += time.monotonic_ns() - began
        return output.scheduled

    def _make_room(self, output: SchedulerOutput) -> bool:
        """False if nothing can be done now: they wait for a forward under way, or for pages of others."""
        outgrown = [r for r in self._room.outgrown(output.stalled) if not r.in_flight]
        for request in outgrown:
            self._fail(request, FailureCode.CAPACITY, f"it outgrew the cache of {self._cache.total} blocks")
        return bool(outgrown) or self._room.make_room(output)

    def _launch(self, scheduled: Sequence[ScheduledRequest]) -> InFlight | None:
        began = time.monotonic_ns()
        cached = [item for item in scheduled if not item.length]
        if cached:
            self._forward_pass.announce_cached(cached, self.listener, began)
            scheduled = [item for item in scheduled if item.length]
        for item in cached:
            self._prefilled(item.request)
        try:
            return self._forward_pass.launch(scheduled, self.listener) if scheduled else None
        except ForwardFailed as error:
            self._fail_batch(scheduled, error)
            return None
        finally:
            self.counters.launch_ns += time.monotonic_ns() - began

    def _take_in_flight(self) -> None:
        flight, self._flight = self._flight, None
        assert flight is not None
        self._take_in(flight)

    def _take_in(self, flight: InFlight) -> None:
        began = time.monotonic_ns()
        try:
            result, outcomes = self._forward_pass.finish(flight, self.listener)
        except ForwardFailed as error:
            self._unpark(flight)
            self._fail_batch(flight.scheduled, error)
            return
        self._unpark(flight)
        ended = time.monotonic_ns()
        self.counters.batches += 1
        self.counters.forward_ns += ended - began
        self.counters.device_ns += result.ended_ns - result.started_ns
        for item, outcome in zip(flight.scheduled, outcomes, strict=True):
            self._update(item, outcome)
        self.counters.prompt_tokens += flight.prompt_tokens
        self.counters.update_ns += time.monotonic_ns() - ended

    def _update(self, item: ScheduledRequest, outcome: Outcome) -> None:
        request, start, length = item
        request.in_flight -= 1
        if outcome is not None:
            request.unknown -= 1
        if request.status >= RequestStatus.FINISHED:
            return
        self._register(request, start, start + length)
        if outcome is None:
            self._prompt_advanced(request)
        elif isinstance(outcome, str):
            self._fail(request, FailureCode.INTERNAL, outcome)
        else:
            self._append(request, outcome)

    def _append(self, request: Request, sampled: SampledToken) -> None:
        token, logprob = sampled
        index = len(request.tokens) - len(request.prompt)
        self._output.tokens.append(NewToken(request.id, index, token, logprob))
        request.tokens.append(token)
        self.counters.tokens += 1
        reason = self.limits.finish_reason(request, token)
        if reason:
            self._end(request, RequestStatus.FINISHED, reason)

    def _prompt_advanced(self, request: Request) -> None:
        if request.prefill_only and request.remaining == 0:
            self._prefilled(request)
        elif request.unborn and request.remaining == 1 and not request.in_flight:
            self._requests.update({child.id: child for child in self._forking.fork(request)})

    def _prefilled(self, request: Request) -> None:
        self._retire(request, RequestStatus.FINISHED)
        self._output.prefilled.append(request.id)

    def _hand_over(self) -> StepOutput:
        output, self._output = self._output, StepOutput()
        output.started, self._scheduler.started = self._scheduler.started, output.started
        if self.prefix and self.prefix.events:
            output.cache_events, self.prefix.events = self.prefix.events, []
        return output

    # ---- how requests come and go ----

    def _admit(self, request: Request) -> None:
        seed = request.sampling.seed
        if seed is None:
            seed = self._seeds.getrandbits(63)
        request.seed = seed
        request.token_limit = self.limits.token_limit(request)
        self._requests[request.id] = request
        self._settled = False

    def _queue(self, request: Request) -> None:
        if request.sampling.max_new_tokens == 0 and not request.prefill_only:
            self._end(request, RequestStatus.FINISHED, FinishReason.LENGTH)
        else:
            self._scheduler.enqueue(request)

    def _fail_batch(self, scheduled: Sequence[ScheduledRequest], error: ForwardFailed) -> None:
        self.counters.failed_batches += 1
        for request, _, _ in scheduled:
            request.in_flight -= 1
            if not request.is_terminal:
                self._fail(request, FailureCode.INTERNAL, str(error))

    def _fail(self, request: Request, code: FailureCode, message: str) -> None:
        failure = Failure(code, f"request {request.id!r} failed: {message}"[:1000])
        self._end(request, RequestStatus.FAILED, FinishReason.ERROR, failure)

    def _end(
        self, request: Request, status: RequestStatus, reason: FinishReason, failure: Failure | None = None
    ) -> None:
        """The one terminal word. Blocks go back, but for those that somebody may be writing to or reading from."""
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            self._cache.quarantine(request.owner)
        elif not request.prefill_only:
            self._give_back(request)
        if not request.prefill_only:
            del self._requests[request.id]
        self._retire(request, status)
        self._output.ended.append(Ended(request.id, reason, failure, request.generated))
        for name in request.unborn:
            self._end_unborn(name, reason, failure)
        request.unborn = []

    def _end_unborn(self, request_id: str, reason: FinishReason, failure: Failure | None) -> None:
        del self._requests[request_id]
        self._output.ended.append(Ended(request_id, reason, failure, 0))

    def _give_back(self, request: Request) -> None:
        self._room.drop(request)
        if request.in_flight:
            self._let_go(request, self._cache.leave(request.owner))
        else:
            self._cache.release(request.owner)

    def _register(self, request: Request, start: int, end: int) -> None:
        """The KV of tokens [start, end) is in the cache, for others to find."""
        self._let_go(request, self._lookup.register(request, start, end))

    def _let_go(self, request: Request, holding: Holding | None) -> None:
        """Free the blocks; if the request is in a forward under way, which still uses them, then after it."""
        if holding is None:
            return
        if request.in_flight:
            assert self._flight is not None
            self._flight.parked.append(holding)
        else:
            self._cache.give_back(holding)

    def _unpark(self, flight: InFlight) -> None:
        for holding in flight.parked:
            self._cache.give_back(holding)
            self._settled = False

    def _retire(self, request: Request, status: RequestStatus) -> None:
        """Out of all queues; its blocks are the caller's matter."""
        request.status = status
        self._remote.pop(request.id, None)
        self._scheduler.remove(request)
        self._settled = False


def _prefix_cache(config: ContinuousBatchingConfig, parts: EngineParts) -> PrefixCache | None:
    """None where blocks cannot, or are not to, be shared."""
    if not config.allow_block_sharing or not parts.pool.geometry.is_full:
        return None
    return PrefixCache(config.eviction_policy, parts.namespace)
