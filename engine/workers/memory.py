"""The memory that the ranks of one engine share with the main process: a memfd that each of them maps.

| page: the progress word | pages of rank 0 | pages of rank 1 | ...      each part begins at a page of the machine
"""

import mmap
import os
from dataclasses import dataclass
from typing import Self

import torch

from engine.cache_pool import aligned
from engine.shared_file import SharedFile, create_memfd


@dataclass(frozen=True)
class SharedMemory:
    """`fd` is the caller's: what is mapped outlives it, as long as any tensor of it. `pool_bytes`: of one rank."""

    fd: int
    ranks: int
    pool_bytes: int

    @classmethod
    def create(cls, ranks: int, pool_bytes: int) -> Self:
        """Zeroed; `close` gives the descriptor back."""
        return cls(create_memfd("kvferry-pages", mmap.PAGESIZE + ranks * aligned(pool_bytes)), ranks, pool_bytes)

    def close(self) -> None:
        os.close(self.fd)

    def word(self) -> mmap.mmap:
        return mmap.mmap(self.fd, mmap.PAGESIZE)

    def pools(self) -> torch.Tensor:
        """Of all ranks, as bytes."""
        return self._map(0, self.ranks)

    def pools_file(self) -> SharedFile:
        """Of `pools`, for whoever else is to map them."""
        return SharedFile(os.dup(self.fd), offset=mmap.PAGESIZE)

    def pool(self, rank: int) -> torch.Tensor:
        """Of one rank, as bytes."""
        return self._map(rank, 1)

    def _map(self, first: int, count: int) -> torch.Tensor:
        pitch = aligned(self.pool_bytes)
        return torch.frombuffer(
            mmap.mmap(self.fd, count * pitch, offset=mmap.PAGESIZE + first * pitch), dtype=torch.uint8
        )
