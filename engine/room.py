"""Making room in a full cache: whose KV goes to host memory, whose is dropped and computed anew."""

import logging
from collections.abc import Sequence

from engine.cache_manager import CacheManager
from engine.counters import EngineCounters
from engine.offload import OffloadStore
from engine.preemption import StalledRequest, choose_victims
from engine.request import Request
from engine.scheduler import Scheduler, SchedulerOutput

log = logging.getLogger(__name__)


class RoomMaker:
    """Only requests that stalled, and that no forward under way is using, ever have to make room."""

    def __init__(
        self, cache: CacheManager, scheduler: Scheduler, store: OffloadStore | None, counters: EngineCounters
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._store = store
        self._counters = counters

    def make_room(self, output: SchedulerOutput) -> bool:
        """For the stalled requests of one scheduling. False if nothing can be done now."""
        self._counters.stalls += len(output.stalled)
        candidates = [s for s in output.stalled if not s.request.in_flight]
        victims = [v.request for v in choose_victims(candidates, self._cache.would_fit, len(self._scheduler.active))]
        copied = self._store.copy_out(victims) if self._store else []
        for request in victims:
            self._send_back(request, copied)
        for request in reversed(victims):
            self._scheduler.send_back(request)
        return bool(victims) or (not output.scheduled and self._pack(candidates))

    def outgrown(self, stalled: Sequence[StalledRequest]) -> list[Request]:
        """Those that would not fit even into an empty cache."""
        pool = self._cache.pool
        return [s.request for s in stalled if not pool.geometry.fits(s.request.computed + 1, pool.num_chunks)]

    def restore(self, output: SchedulerOutput) -> None:
        """Before the forward: KV comes back into the blocks that were taken for it."""
        if output.restored:
            assert self._store is not None
            self._counters.restores += len(output.restored)
            self._store.restore(output.restored)

    def drop(self, request: Request) -> None:
        """It will not come back."""
        if self._store is not None and request.offloaded:
            self._store.drop(request.owner)
            request.offloaded = False

    def _pack(self, candidates: Sequence[StalledRequest]) -> bool:
        """One that has the cache to itself and lacks blocks all the same: its own lie scattered over the chunks of
        several groups. It starts over where it stands, and gets them side by side."""
        if len(candidates) != 1 or len(self._scheduler.active) != 1 or len(self._cache.holdings()) != 1:
            return False
        request = candidates[0].request
        self._cache.release(request.owner, keep=False)
        request.capacity = 0
        request.soft_reset()
        self._scheduler.start_over(request)
        self._counters.resets += 1
        log.info("request %s starts over at %d tokens, to be packed", request.id, len(request.tokens))
        return True

    def _send_back(self, request: Request, copied: Sequence[Request]) -> None:
        """What it leaves behind in the cache is free at once, not kept for a later hit."""
        self._cache.release(request.owner, keep=False)
        request.capacity = 0
        if request in copied:
            self._counters.offloads += 1
            request.offloaded = True
            log.info("request %s offloaded at %d tokens", request.id, len(request.tokens))
        else:
            self._counters.resets += 1
            request.soft_reset()
            log.info("soft reset of request %s at %d tokens", request.id, len(request.tokens))
