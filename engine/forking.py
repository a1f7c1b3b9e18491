"""Several sequences of one prompt: the parent computes all but its last token, then the others begin as copies."""

from engine.cache_manager import CacheManager
from engine.counters import EngineCounters
from engine.lives import Lives
from engine.offload import copy_blocks
from engine.request import Request
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
    child.context = parent.context
    return child


class Forking:
    """Children each run the prompt's last token themselves, so their first tokens are drawn independently. Where the
    prompt's KV came from makes no difference."""

    def __init__(self, cache: CacheManager, scheduler: Scheduler, lives: Lives, counters: EngineCounters) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._lives = lives
        self._counters = counters

    def expect(self, parent: Request) -> None:
        """Its children's ids are taken from now on. Once it was admitted."""
        parent.unborn = parent.child_ids()
        self._lives.requests.update(dict.fromkeys(parent.unborn, parent))

    def fork(self, parent: Request) -> None:
        """All children still unborn are queued: those that fit with the parent's KV, the others from the beginning."""
        self._cache.recycle()
        wanted, parent.unborn = set(parent.unborn), []
        for sequence, name in enumerate(parent.child_ids(), 1):
            if name in wanted:
                self._begin(parent, child_of(parent, sequence))

    def _begin(self, parent: Request, child: Request) -> None:
        self._lives.requests[child.id] = child
        if self._cache.can_fork(parent.owner):
            self._copy(parent, child)
        else:
            self._scheduler.enqueue(child)

    def _copy(self, parent: Request, child: Request) -> None:
        for move in self._cache.fork(parent.owner, child.owner):
            copy_blocks(self._cache.pool, self._cache.pool, move)
        self._counters.forks += 1
        child.computed = parent.computed
        child.status = parent.status
        self._scheduler.activate(child)
