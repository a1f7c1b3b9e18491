"""How requests come into an engine and leave it: one terminal word for each, and every block given back once."""

import random

from engine.cache_manager import CacheManager, Holding
from engine.forward import InFlight
from engine.limits import Limits
from engine.outputs import Ended, StepOutput
from engine.prefix_lookup import PrefixLookup
from engine.request import Request, RequestStatus
from engine.room import RoomMaker
from engine.scheduler import Scheduler
from protocol.messages import Failure, FailureCode, FinishReason


class Lives:
    """Owns the table of living requests. `requests`: by id; a child that is still to be forked off stands for its
    parent. `remote`: those that wait for KV from elsewhere. `output`: what the next step reports. `flight`: the forward
    under way, to which blocks are tied that it still uses. `settled`: nothing can be scheduled until something changes.
    """

    def __init__(
        self,
        limits: Limits,
        cache: CacheManager,
        lookup: PrefixLookup,
        scheduler: Scheduler,
        room: RoomMaker,
        seed: int | None,
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.remote: dict[str, Request] = {}
        self.output = StepOutput()
        self.flight: InFlight | None = None
        self.settled = True
        self._limits = limits
        self._cache = cache
        self._lookup = lookup
        self._scheduler = scheduler
        self._room = room
        self._seeds = random.Random(seed)

    def admit(self, request: Request) -> None:
        """It lives from now on, and has not been queued."""
        seed = request.sampling.seed
        request.seed(self._seeds.getrandbits(63) if seed is None else seed)
        request.token_limit = self._limits.token_limit(request)
        request.end_tokens = self._limits.end_tokens(request)
        self.requests[request.id] = request
        self.settled = False

    def queue(self, request: Request) -> None:
        """One that wants no tokens ends instead."""
        if request.sampling.max_new_tokens == 0 and not request.prefill_only:
            self.end(request, RequestStatus.FINISHED, FinishReason.LENGTH)
        else:
            self._scheduler.enqueue(request)

    def fail(self, request: Request, code: FailureCode, message: str, keep: bool = True) -> None:
        """`keep`: its full blocks stay for later hits."""
        failure = Failure(code, f"request {request.id!r} failed: {message}"[:1000])
        self.end(request, RequestStatus.FAILED, FinishReason.ERROR, failure, keep)

    def end(
        self,
        request: Request,
        status: RequestStatus,
        reason: FinishReason,
        failure: Failure | None = None,
        keep: bool = True,
    ) -> None:
        """The one terminal word. Blocks go back, but for those that somebody may be writing to or reading from."""
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            self._cache.quarantine(request.owner)
        elif not request.prefill_only:
            self._give_back(request, keep)
        if not request.prefill_only:
            del self.requests[request.id]
        self.retire(request, status)
        self.output.ended.append(Ended(request.id, reason, failure, request.generated))
        for name in request.unborn:
            self.end_unborn(name, reason, failure)
        request.unborn = []

    def end_unborn(self, request_id: str, reason: FinishReason, failure: Failure | None) -> None:
        """A child that is never forked off."""
        del self.requests[request_id]
        self.output.ended.append(Ended(request_id, reason, failure, 0))

    def prefilled(self, request: Request) -> None:
        """The prompt of a prefill-only request is in its blocks, which stay its own."""
        self.retire(request, RequestStatus.FINISHED)
        self.output.prefilled.append(request.id)

    def retire(self, request: Request, status: RequestStatus) -> None:
        """Out of all queues; its blocks are the caller's matter."""
        request.status = status
        self.remote.pop(request.id, None)
        self._scheduler.remove(request)
        self.settled = False

    def register(self, request: Request, start: int, end: int) -> None:
        """The KV of tokens [start, end) is in the cache, for others to find."""
        self._let_go(request, self._lookup.register(request, start, end))

    def unpark(self, flight: InFlight) -> None:
        """It has ended: the blocks that were tied to it are free."""
        for holding in flight.parked:
            self._cache.give_back(holding)
            self.settled = False

    def hand_over(self) -> StepOutput:
        """What has happened since it was last asked."""
        output, self.output = self.output, StepOutput()
        output.started, self._scheduler.started = self._scheduler.started, output.started
        prefix = self._cache.prefix
        if prefix and prefix.events:
            output.cache_events, prefix.events = prefix.events, []
        return output

    def _give_back(self, request: Request, keep: bool) -> None:
        self._room.drop(request)
        if request.in_flight:
            self._let_go(request, self._cache.leave(request.owner, keep))
        else:
            self._cache.release(request.owner, keep)

    def _let_go(self, request: Request, holding: Holding | None) -> None:
        """Free the blocks; if the request is in a forward under way, which still uses them, then after it."""
        if holding is None:
            return
        if request.in_flight:
            assert self.flight is not None
            self.flight.parked.append(holding)
        else:
            self._cache.give_back(holding)
