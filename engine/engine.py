"""The engine: owns all requests and pages, and moves everything on by one step at a time.

One thread owns it (see `loop`); every method is for that thread, except where it says otherwise.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from engine.cache_manager import CacheManager, HoldingState
from engine.cache_pool import CachePool, PoolMemory
from engine.config import ContinuousBatchingConfig
from engine.contexts import Context, ContextSlots
from engine.counters import EngineCounters
from engine.errors import DeviceLost, InvalidRequest, NoRoom, UnknownRequest
from engine.forking import Forking, child_of
from engine.forward import ForwardPass
from engine.ledger import check, ledger
from engine.limits import Limits
from engine.lives import Lives
from engine.offload import OffloadStore
from engine.outputs import EngineListener, StepOutput
from engine.prefix_cache import PrefixCache, PrefixCounters
from engine.prefix_lookup import PrefixLookup
from engine.progress import ProgressWord
from engine.request import Owner, Request, RequestStatus
from engine.room import RoomMaker
from engine.runner import Runner
from engine.scheduler import SCHEDULERS
from engine.stepping import Stepping
from protocol.layout import KVLayout
from protocol.messages import FinishReason

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """What an engine is put together from (see `build`). `host_pool`: memory for the KV of requests that had to make
    room; None: they are computed anew. `asynchronous`: schedule the next forward while one runs. `namespace`: whatever
    changes KV besides the tokens; goes into the hashes of cached prefixes. `kv_heads`: of the whole model, where the
    pool's ranks each hold a part of them; None: the pool's. `contexts`: slots, where the runner hands over contexts."""

    pool: CachePool
    runner: Runner
    progress: ProgressWord
    limits: Limits
    host_pool: CachePool | None = None
    asynchronous: bool = False
    namespace: str = ""
    kv_heads: int | None = None
    contexts: ContextSlots | None = None


class Reservation(NamedTuple):
    """`tables`: the blocks for the whole prompt, in token order, by group. The first `cached` of the first group hold
    their KV already and are shared: nobody may write to them. `whole`: nothing needs to come from elsewhere, all but
    the last token having been here; a context is computed here then, for which a block may have to be computed again.
    `context_slot`: where the context is to come."""

    tables: list[list[int]]
    cached: int
    whole: bool
    context_slot: int | None


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
        self.counters = EngineCounters()
        self.prefix = _prefix_cache(config, parts)
        self._runner = parts.runner
        self._kv_heads = parts.kv_heads
        self._asynchronous = parts.asynchronous
        self._cache = CacheManager(parts.pool, self.prefix, contexts=parts.contexts)
        self._lookup = PrefixLookup(self._cache)
        self._scheduler = SCHEDULERS[config.scheduler_type](config, self._cache, self._lookup)
        self.offload = OffloadStore(self._cache, parts.host_pool) if parts.host_pool else None
        room = RoomMaker(self._cache, self._scheduler, self.offload, self.counters)
        self._lives = Lives(parts.limits, self._cache, self._lookup, self._scheduler, room, config.seed)
        self._forking = Forking(self._cache, self._scheduler, self._lives, self.counters)
        forward_pass = ForwardPass(parts.runner, self._cache, parts.progress)
        self._stepping = Stepping(
            self._lives,
            self._scheduler,
            room,
            self._forking,
            forward_pass,
            self.counters,
            self.pool.geometry.page_size,
        )
        self.listener = listener

    def close(self) -> None:
        """Waits for a forward under way; the runner ends, and the processes that it runs in."""
        flight, self._lives.flight = self._lives.flight, None
        try:
            if flight:
                self._stepping.take_in(flight)
        except DeviceLost as error:
            log.info("a forward was under way: %s", error)
        finally:
            self._runner.close()

    def when_lost(self, call: Callable[[DeviceLost], None]) -> None:
        """Called once, from any thread, if a process that the engine is made of ends or hangs: every step raises that
        error from then on. Replaces the one before."""
        self._runner.when_lost(call)

    @property
    def listener(self) -> EngineListener | None:
        return self._stepping.listener

    @listener.setter
    def listener(self, listener: EngineListener | None) -> None:
        self._stepping.listener = listener

    # ---- what it is: any thread ----

    @property
    def layout(self) -> KVLayout:
        """Of all ranks together."""
        layout = self.pool.geometry.layout(self.pool.ranks, self._kv_heads)
        contexts = self._cache.contexts
        return replace(layout, context=contexts.layout) if contexts else layout

    @property
    def pools(self) -> list[PoolMemory]:
        """What is to be registered for KV to be moved: each rank's pages, in order of rank."""
        return self.pool.memories

    @property
    def context_memory(self) -> PoolMemory | None:
        """What is to be registered for contexts to be moved, if any are kept."""
        return self._cache.contexts.memory if self._cache.contexts else None

    @property
    def context_slots_free(self) -> int:
        return self._cache.contexts.free if self._cache.contexts else 0

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
    def prefix_counters(self) -> PrefixCounters:
        """All 0 where nothing is shared."""
        return self.prefix.counters if self.prefix else PrefixCounters()

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

    def context(self, request_id: str) -> Context | None:
        """What was computed here, or has come, of the position before the prompt's last token; None: not yet, or the
        engine keeps none. Raises UnknownRequest. For the engine's thread."""
        request = self._lives.requests.get(request_id)
        if request is None:
            raise UnknownRequest(f"request {request_id!r} does not run here")
        return request.context

    # ---- requests that run here ----

    def validate(self, request: Request) -> None:
        """Raises InvalidRequest or CapacityExceeded, as `add` and `reserve` would."""
        self.limits.validate(request)
        for name in (request.id, *request.child_ids()):
            if name in self._lives.requests:
                raise InvalidRequest(f"request {name!r} is running already")
        if self._cache.holds(request.owner):
            raise InvalidRequest(f"request {request.id!r}: pages of attempt {request.attempt} are still in quarantine")
        if request.prefill_only and self._asynchronous:
            raise InvalidRequest(f"request {request.id!r}: prefill-only requests need synchronous batching")

    def add(self, request: Request) -> None:
        """Queue it. Raises InvalidRequest or CapacityExceeded."""
        self.validate(request)
        self._lives.admit(request)
        if len(request.prompt) == 1 or request.sampling.max_new_tokens == 0:
            family = [request, *(child_of(request, i) for i in range(1, request.n))]
        else:
            family = [request]
            self._forking.expect(request)
        for member in family:
            self._lives.requests[member.id] = member
            self._lives.queue(member)

    def abort(self, request_id: str) -> None:
        """Stop it, in whatever state; unknown ids are ignored. Exactly one Ended(CANCELLED) comes with the next step;
        one for each child that was not forked off yet, too.

        A prefill-only request stops being scheduled, keeps its blocks until `release`, and has no Ended.
        """
        request = self._lives.requests.get(request_id)
        if request is None or request.is_terminal:
            return
        if request.prefill_only:
            self._lives.retire(request, RequestStatus.CANCELLED)
        elif request_id != request.id:
            request.unborn.remove(request_id)
            self._lives.end_unborn(request_id, FinishReason.CANCELLED, None)
        else:
            self._lives.end(request, RequestStatus.CANCELLED, FinishReason.CANCELLED)

    def release(self, request_id: str) -> None:
        """Free the blocks of a prefill-only request: all writes from them have completed, or can no longer start.

        One that still runs is stopped. Unknown ids are ignored.
        """
        request = self._lives.requests.get(request_id)
        if request is None or not request.prefill_only:
            return
        self._lives.retire(request, RequestStatus.FINISHED)
        del self._lives.requests[request_id]
        self._cache.release(request.owner)

    # ---- requests whose prompt is computed elsewhere ----

    def can_reserve(self, request: Request) -> bool:
        """Under the rules of admission: free blocks, safety margin, no reset request being held back."""
        busy = bool(self._scheduler.active or self._lives.remote)
        return self._scheduler.may_reserve(request, self._lookup.hits(request), busy)

    def reserve(self, request: Request) -> Reservation:
        """Blocks for the whole prompt; the request waits until `resume`.

        Raises InvalidRequest, CapacityExceeded, or NoRoom when `can_reserve` says no.
        """
        self.validate(request)
        if not self.can_reserve(request):
            raise NoRoom(f"request {request.id!r}: no room for {len(request.prompt)} tokens now")
        hits, whole = self._lookup.hits(request), self._lookup.holds_prompt(request)
        self._lives.admit(request)
        self._forking.expect(request)
        self._scheduler.count_reservation()
        self._lookup.count(request, hits)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KV
        self._lives.remote[request.id] = request
        holding = self._cache.hold(request.owner, len(request.prompt), hits, self._cache.wants_context(request))
        return Reservation([list(table) for table in holding.tables], len(hits), whole, holding.slot)

    def resume(self, request_id: str, computed: int) -> None:
        """KV of the first `computed` tokens is in its blocks, and the context of the position before the prompt's last
        token in its slot if that is one of them: schedule the rest, and the sequences that begin with it. Nobody may
        write there any more. Raises UnknownRequest."""
        request = self._lives.remote.pop(request_id, None)
        if request is None:
            raise UnknownRequest(f"request {request_id!r} does not wait for KV")
        assert 0 <= computed < len(request.tokens), f"{computed} tokens computed of {len(request.tokens)}"
        self._lives.settled = False
        request.computed = computed
        self._cache.receive_context(request, arrived=computed > request.context_position)
        self._lives.register(request, 0, computed)
        request.status = RequestStatus.DECODING if request.remaining == 1 else RequestStatus.PREFILLING
        if request.sampling.max_new_tokens == 0:
            self._lives.end(request, RequestStatus.FINISHED, FinishReason.LENGTH)
            return
        self._scheduler.activate(request)
        if request.unborn and request.remaining == 1:
            self._forking.fork(request)

    def quarantine(self, request_id: str) -> None:
        """A request that waits for KV leaves the engine, with all its sequences and without an Ended; its blocks stay
        out of use, as somebody may still write to them. Other ids are ignored."""
        request = self._lives.remote.get(request_id)
        if request is None:
            return
        for name in (request_id, *request.unborn):
            del self._lives.requests[name]
        self._cache.quarantine(request.owner)
        self._lives.retire(request, RequestStatus.FAILED)

    def free_quarantined(self, request_id: str, attempt: int) -> None:
        """Nobody can write there any more. Unknown owners are ignored."""
        owner = Owner(request_id, attempt)
        if self._cache.is_quarantined(owner):
            self._cache.release(owner)
            self._lives.settled = False

    # ---- the step ----

    @property
    def has_work(self) -> bool:
        """False when a step would do nothing: no request, or all that there are wait for others to act."""
        lives, queued = self._lives, self._scheduler.active or len(self._scheduler.waiting)
        return bool(lives.output) or lives.flight is not None or (not lives.settled and bool(queued))

    def step(self) -> StepOutput:
        """Schedule, run one forward, update. Raises for faults of the engine itself, never for those of a request.

        Asynchronously, the forward that is updated from is the one launched by the step before.
        """
        scheduled = self._stepping.schedule()
        self._lives.settled = not scheduled and self._lives.flight is None
        flight = self._stepping.launch(scheduled)
        if self._asynchronous:
            flight, self._lives.flight = self._lives.flight, flight
        if flight:
            self._stepping.take_in(flight)
        return self._lives.hand_over()

    def check(self) -> None:
        """Assert what must hold between steps: each block in one place, and none held by nobody."""
        check(self._cache)
        holdings, flight = self._cache.holdings(), self._lives.flight
        owners = {request.owner for request in self._lives.requests.values()}
        stray = [h.owner for h in holdings if h.state is HoldingState.HELD and h.owner not in owners]
        assert not stray, f"blocks held by requests that are gone: {stray}"
        leaving = [h for h in holdings if h.state is HoldingState.LEAVING]
        assert leaving == (flight.parked if flight else []), "blocks wait for no forward under way"


def _prefix_cache(config: ContinuousBatchingConfig, parts: EngineParts) -> PrefixCache | None:
    """None where blocks cannot, or are not to, be shared."""
    if not config.allow_block_sharing or not parts.pool.geometry.is_full:
        return None
    return PrefixCache(config.eviction_policy, parts.namespace)
