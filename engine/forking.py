"""Several sequences of one prompt: the parent computes all but its last token, then the others begin as copies."""

from engine.cache_manager import CacheManager
from engine.counters import EngineCounters
from engine.offload import copy_blocks
from engine.request import Request, RequestStatus
from engine.scheduler import Scheduler


def child_of(parent: Request, sequence: int) -> Request:
    """The `sequence`th further sequence of the parent's prompt, from 1. Nothing computed yet."""
    child = Request(
        f"{parent.id}__child#{sequence}",
        parent.prompt,
        parent.sampling,
        attempt=parent.attempt,
        priority=parent.priority,
        cache_salt=parent.cache_salt,
    )
    child.seed((parent.samples.seed + sequence) % (1 << 63))
    child.token_limit, child.end_tokens = parent.token_limit, parent.end_tokens
    return child


class Forking:
    """Children each run the prompt's last token themselves, so their first tokens are drawn independently."""

    def __init__(self, cache: CacheManager, scheduler: Scheduler, counters: EngineCounters) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._counters = counters

    def fork(self, parent: Request) -> list[Request]:
        """All children still unborn, queued: those that fit with the parent's KV, the others from the beginning."""
        self._cache.recycle()
        wanted, parent.unborn = set(parent.unborn), []
        children = [child for child in (child_of(parent, i) for i in range(1, parent.n)) if child.id in wanted]
        for child in children:
            if self._cache.can_fork(parent.owner):
                self._copy(parent, child)
            else:
                self._scheduler.enqueue(child)
        return children

    def _copy(self, parent: Request, child: Request) -> None:
        for move in self._cache.fork(parent.owner, child.owner):
            copy_blocks(self._cache.pool, self._cache.pool, move)
        self._counters.forks += 1
        child.computed = parent.computed
        child.status = RequestStatus.PREFILLING
        self._scheduler.activate(child)
