"""The progress word: a counter in memory that says how many layers this engine has ever finished."""

import ctypes
import mmap


class ProgressWord:
    """A u64 at a stable, page-aligned address; it only ever grows, by one per layer, and is never reset.

    Written by the one thread that runs forwards; anybody may read it. When layer l of a forward that began at value v
    is done, the word is v + l + 1, and that layer's KV of the forward's tokens is in its pages.
    """

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        """`memory`: a page, which may be shared with the process that runs the forwards; None: one of its own."""
        self._memory = mmap.mmap(-1, mmap.PAGESIZE) if memory is None else memory
        self._word = ctypes.c_uint64.from_buffer(self._memory)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._word)

    @property
    def value(self) -> int:
        return self._word.value

    def advance(self) -> None:
        """One aligned 8-byte store, after the stores of the layer's KV (x86 keeps that order)."""
        self._word.value += 1
