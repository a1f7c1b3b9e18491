"""The memory of all pages: one flat tensor, allocated once, registered once, never moved."""

import mmap

import torch

from engine.errors import PoisonBroken
from protocol.layout import KVLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
POISON_BYTE = 0xFF
"""A float of any of our dtypes whose bytes are all 0xFF is NaN: attention that reads a stale slot shows at once."""


class CachePool:
    """`pages` is `[chunks, layers, kv_heads, 2, page_size, head_dim]`, in page-aligned memory of its own.

    Hands out chunks. With one attention type a chunk is exactly one block; with several it will be a whole number of
    blocks of each, and two chunks in front will be kept back for padding. The memory lives as long as the pool or any
    view of it: whoever registered `address` deregisters first.
    """

    def __init__(self, layout: KVLayout, num_chunks: int, debug_pages: bool = False) -> None:
        self.layout = layout
        self.num_chunks = num_chunks
        self.bytes = num_chunks * layout.block_bytes
        self._memory = mmap.mmap(-1, self.bytes)
        self._raw = torch.frombuffer(self._memory, dtype=torch.uint8).view(num_chunks, layout.block_bytes)
        shape = (num_chunks, layout.layers, layout.kv_heads, 2, layout.page_size, layout.head_dim)
        self.pages = self._raw.view(DTYPES[layout.dtype]).view(shape)
        self._debug = debug_pages
        self._free = list(range(num_chunks - 1, -1, -1))
        if debug_pages:
            self._raw.fill_(POISON_BYTE)

    @property
    def address(self) -> int:
        return self._raw.data_ptr()

    @property
    def free_chunks(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """The most recently freed first: their memory is warm. Raises PoisonBroken in debug mode."""
        assert count <= len(self._free), f"{count} chunks wanted, {len(self._free)} free"
        chunks = [self._free.pop() for _ in range(count)]
        if self._debug:
            self._check_poison(chunks)
        return chunks

    def give_back(self, chunks: list[int]) -> None:
        """Nobody, here or on another machine, may still write to them."""
        if self._debug:
            self._raw[chunks] = POISON_BYTE
        self._free.extend(reversed(chunks))

    def free_list(self) -> list[int]:
        return list(self._free)

    def _check_poison(self, chunks: list[int]) -> None:
        for chunk in chunks:
            wrong = torch.nonzero(self._raw[chunk] != POISON_BYTE).flatten()
            if len(wrong):
                layer = int(wrong[0]) // self.layout.page_bytes
                raise PoisonBroken(
                    f"chunk {chunk} was written to while free: {len(wrong)} bytes, first in layer {layer}"
                )
