"""The memory of all pages: one flat tensor, allocated once, registered once, never moved."""

import mmap
from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.errors import PoisonBroken
from engine.geometry import READ_PADDING_CHUNK, RESERVED_CHUNKS, CacheGeometry
from engine.shared_file import SharedFile, shared_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
POISON_BYTE = 0xFF
"""A float of any of our dtypes whose bytes are all 0xFF is NaN: attention that reads a stale slot shows at once."""


class PoolMemory(NamedTuple):
    """Of one rank, in bytes. `cuda_device`: the ordinal of the device that it is on; None: the host. `file`: the memfd
    that it is a mapping of, from `file_offset` on, open as long as the engine lives; None: others cannot map it."""

    address: int
    bytes: int
    cuda_device: int | None = None
    file: int | None = None
    file_offset: int = 0


class CachePool:
    """`num_chunks` data chunks behind `reserved` ones that are never handed out. Hands out chunks; blocks are the
    allocators' matter. Block b of a group lies at `b * block_bytes`: chunk c is its blocks
    `c * blocks_per_chunk`... The memory lives as long as the pool or any view of it: whoever registered `address`
    deregisters first.

    Of a model that is divided among `ranks`, it is the pools of all of them side by side: the ranks use the same blocks
    for the same tokens, each for its own heads. `memory`: zeroed bytes to lie in, `aligned(bytes)` for each rank, and
    the `file` of it, if other processes may map it. On a CPU it makes both itself.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        num_chunks: int,
        debug_pages: bool = False,
        reserved: int = RESERVED_CHUNKS,
        device: str = "cpu",
        ranks: int = 1,
        memory: torch.Tensor | None = None,
        file: SharedFile | None = None,
    ) -> None:
        self.geometry = geometry
        self.num_chunks = num_chunks
        self.reserved = reserved
        self.device = device
        self.ranks = ranks
        self.bytes = pool_bytes(geometry, num_chunks, reserved)
        if memory is None:
            memory, file = _memory(ranks * aligned(self.bytes), device)
        self._file = file
        flat = memory.view(ranks, aligned(self.bytes))[:, : self.bytes]
        self._raw = flat.view(ranks, reserved + num_chunks, geometry.chunk_bytes)
        self._free = list(range(reserved + num_chunks - 1, reserved - 1, -1))
        self._debug = debug_pages
        if debug_pages:
            self._raw[:, READ_PADDING_CHUNK + 1 :] = POISON_BYTE
        self._by_block = [flat.view(ranks, -1, size) for size in geometry.block_bytes]

    @property
    def address(self) -> int:
        """Of the first rank's."""
        return self._raw.data_ptr()

    @property
    def memories(self) -> list[PoolMemory]:
        """In order of rank."""
        pitch = self._raw.stride(0)
        device = self._raw.device
        ordinal = device.index if device.type == "cuda" else None
        fd, offset = (self._file.fd, self._file.offset) if self._file else (None, 0)
        return [
            PoolMemory(self.address + rank * pitch, self.bytes, ordinal, fd, offset + rank * pitch)
            for rank in range(self.ranks)
        ]

    @property
    def free_chunks(self) -> int:
        return len(self._free)

    def pages(self, group: int) -> torch.Tensor:
        """`[blocks, layers_of_group, kv_heads, parts, page_size, head_dim]` of the first rank. A view; the reserved
        chunks are in it."""
        g = self.geometry
        shape = (-1, len(g.groups[group].layers), g.kv_heads, g.parts, g.page_size, g.head_dim)
        return self._raw[0].view(DTYPES[g.dtype]).view(shape)

    def raw_blocks(self, group: int) -> torch.Tensor:
        """The memory of all ranks as bytes, `[ranks, blocks, block_bytes]`."""
        return self._by_block[group]

    def take(self) -> int:
        """The most recently freed chunk: its memory is warm."""
        assert self._free, "no chunk is free"
        return self._free.pop()

    def give_back(self, chunk: int) -> None:
        """Nobody, here or on another machine, may still write to it."""
        self._free.append(chunk)

    def free_list(self) -> list[int]:
        return list(self._free)

    def poison(self, group: int, blocks: Sequence[int]) -> None:
        """In debug mode: whoever reads these blocks from now on reads NaN, whoever writes to them is found out."""
        if self._debug:
            self._by_block[group][:, list(blocks)] = POISON_BYTE

    def check_poison(self, group: int, blocks: Sequence[int]) -> None:
        """In debug mode: raises PoisonBroken if one of these free blocks was written to."""
        if not self._debug:
            return
        for block in blocks:
            wrong = torch.nonzero(self._by_block[group][:, block] != POISON_BYTE)
            if len(wrong):
                rank, byte = wrong[0].tolist()
                where = f"page {byte // self.geometry.page_bytes} of it on rank {rank}"
                raise PoisonBroken(f"block {block} was written to while free: {len(wrong)} bytes, first in {where}")


def pool_bytes(geometry: CacheGeometry, num_chunks: int, reserved: int = RESERVED_CHUNKS) -> int:
    """Of one rank."""
    return (reserved + num_chunks) * geometry.chunk_bytes


def aligned(size: int) -> int:
    """Whole pages of the machine."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _memory(size: int, device: str) -> tuple[torch.Tensor, SharedFile | None]:
    """Zeroed."""
    if device != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device), None
    return shared_bytes("kvferry-pages", size)
