"""The blocks of one layer group: how many a request needs, which are free. Tables are the cache manager's matter."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from engine.cache_pool import CachePool
from engine.geometry import UNBOUNDED
from engine.prefix_cache import PrefixCache


class CacheAllocator(ABC):
    """Takes chunks from the pool, cuts them into its group's blocks, and returns chunks that are wholly free."""

    def __init__(self, pool: CachePool, group: int) -> None:
        self.group = group
        self.page_size = pool.geometry.page_size
        self.blocks_per_chunk = pool.geometry.blocks_per_chunk[group]
        self._layers = pool.geometry.groups[group]
        self._pool = pool
        self._free: list[int] = []
        self._used: dict[int, int] = {}

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a request of `tokens` tokens in KV holds."""
        return self._layers.pages_for(tokens, self.page_size)

    @abstractmethod
    def capacity(self, blocks: int) -> int:
        """Tokens up to which a table of `blocks` blocks need not grow."""

    @property
    def free(self) -> int:
        """Plain free blocks in chunks of this group."""
        return len(self._free)

    @property
    def evictable(self) -> int:
        """Blocks that nobody uses but that are kept for a hit."""
        return 0

    def take(self, count: int) -> list[int]:
        """From chunks in use first. The caller has made sure that there are enough."""
        blocks = []
        for _ in range(count):
            if not self._free:
                self._open_chunk()
            block = self._free.pop()
            self._used[block // self.blocks_per_chunk] += 1
            blocks.append(block)
        self._pool.check_poison(self.group, blocks)
        return blocks

    def give_back(self, blocks: Sequence[int], keep: bool) -> None:
        """One user fewer of each, in table order. `keep`: what could be hit later stays initialised."""
        self._set_free(blocks)

    def recycle(self) -> None:
        """Wholly free chunks go back to the pool, where any group may have them."""
        empty = {chunk for chunk, used in self._used.items() if not used}
        if not empty:
            return
        self._free = [block for block in self._free if block // self.blocks_per_chunk not in empty]
        for chunk in sorted(empty, reverse=True):
            del self._used[chunk]
            self._pool.give_back(chunk)

    def free_list(self) -> list[int]:
        return list(self._free)

    def chunks(self) -> list[int]:
        """Chunks that are this group's now."""
        return list(self._used)

    def _open_chunk(self) -> None:
        chunk = self._pool.take()
        self._used[chunk] = 0
        first = chunk * self.blocks_per_chunk
        self._free.extend(range(first + self.blocks_per_chunk - 1, first - 1, -1))

    def _set_free(self, blocks: Sequence[int]) -> None:
        """In reverse, so that the first of them is the next one taken."""
        self._pool.poison(self.group, blocks)
        for block in blocks:
            self._used[block // self.blocks_per_chunk] -= 1
        self._free += reversed(blocks)


class FullAttentionCacheAllocator(CacheAllocator):
    """Layers that attend to everything: one block per `page_size` tokens, and full ones may be shared.

    `prefix` None: nothing is shared or kept.
    """

    def __init__(self, pool: CachePool, group: int, prefix: PrefixCache | None = None) -> None:
        super().__init__(pool, group)
        self.prefix = prefix

    def capacity(self, blocks: int) -> int:
        return blocks * self.page_size

    @property
    def evictable(self) -> int:
        return self.prefix.initialised if self.prefix else 0

    def take(self, count: int) -> list[int]:
        """Plain free ones first; only what is still missing is taken from the initialised ones."""
        short = count - self.free - self._pool.free_chunks * self.blocks_per_chunk
        if short > 0 and self.prefix:
            self._set_free(self.prefix.evict(short))
        return super().take(count)

    def give_back(self, blocks: Sequence[int], keep: bool) -> None:
        prefix = self.prefix
        if prefix is None:
            self._set_free(blocks)
            return
        self._set_free(prefix.release(blocks, keep))


class SlidingAttentionCacheAllocator(CacheAllocator):
    """Layers that attend to the last `window` tokens: a ring of `window` slots, grown until it is whole, then reused.

    Never shared: what a block holds depends on how far its request has come.
    """

    def capacity(self, blocks: int) -> int:
        return UNBOUNDED if blocks == self.blocks_for(UNBOUNDED) else blocks * self.page_size
