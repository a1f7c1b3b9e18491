"""From a request's tokens to the cached blocks that it may begin with, and back: registering what it has computed."""

from collections.abc import Sequence

from engine.cache_manager import CacheManager, Holding
from engine.prefix_cache import block_hashes
from engine.request import Request


class PrefixLookup:
    """Keeps each request's chain of block hashes on the request, so that no token is hashed twice."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._page_size = cache.pool.geometry.page_size

    def hits(self, request: Request) -> list[int]:
        """Blocks that hold the longest cached prefix; looked up anew each time, as the cache may have changed. A token
        is always left to compute, where one is to be sampled (two, where the last one is left to forks), and so is the
        position whose context is wanted."""
        prefix = self._cache.prefix
        if prefix is None or self._cache.holds(request.owner):
            return []
        most = len(request.tokens) - (0 if request.prefill_only else 2 if request.unborn else 1)
        if self._cache.wants_context(request):
            most = min(most, request.context_position)
        return prefix.match(self._hashes(request, max(0, most) // self._page_size))

    def holds_prompt(self, request: Request) -> bool:
        """Whether all of the prompt but its last token is cached, in whole blocks."""
        prefix, (blocks, rest) = self._cache.prefix, divmod(len(request.prompt) - 1, self._page_size)
        return prefix is not None and not rest and len(prefix.match(self._hashes(request, blocks))) == blocks

    def count(self, request: Request, hits: Sequence[int]) -> None:
        """In the statistics: the request was scheduled with these hits."""
        prefix = self._cache.prefix
        if prefix is not None and not request.offloaded:
            prefix.counters.queries += len(request.tokens) // self._page_size
            prefix.counters.hits += len(hits)

    def register(self, request: Request, start: int, end: int) -> Holding | None:
        """The KV of tokens [start, end) is in the request's blocks now, as that of those before was. Blocks of a
        prefill-only request stay where they are: the network reads from their addresses. Returns blocks of others that
        were replaced by equal ones, for `CacheManager.give_back`."""
        complete = end // self._page_size
        if self._cache.prefix is None or complete == start // self._page_size:
            return None
        return self._cache.register(request.owner, self._hashes(request, complete), not request.prefill_only)

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        """Of its first `count` blocks."""
        hashes, size = request.block_hashes, self._page_size
        if len(hashes) < count:
            prefix = self._cache.prefix
            assert prefix is not None
            parent = hashes[-1] if hashes else prefix.root(request.cache_salt)
            hashes += block_hashes(parent, request.tokens[len(hashes) * size : count * size], size)
        return hashes if len(hashes) == count else hashes[:count]
