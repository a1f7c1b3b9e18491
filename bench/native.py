"""What the benchmarks do in C, with the GIL released (`bench/core`)."""

from typing import Any

import numpy as np
import numpy.typing as npt

from bench._core import ffi, lib

Pool = npt.NDArray[np.uint8]


def send(fd: int, pool: Pool, page: int, writes: int) -> None:
    """`writes` pages of `page` bytes from `pool`, over and over it, into a stream. Raises OSError."""
    _check(lib.kb_send(fd, _bytes(pool), pool.nbytes, page, writes))


def receive(fd: int, pool: Pool, page: int, writes: int) -> None:
    """As many, each into a page of `pool`. Raises OSError."""
    _check(lib.kb_receive(fd, _bytes(pool), pool.nbytes, page, writes))


def copy(to: Pool, source: Pool, page: int, writes: int) -> None:
    """As many, from memory to memory."""
    lib.kb_copy(_bytes(to), _bytes(source), min(to.nbytes, source.nbytes), page, writes)


def advance(word_address: int, steps: int, period_ns: int) -> list[int]:
    """Raise a progress word `steps` times by one, `period_ns` apart; when (CLOCK_MONOTONIC, just before each store)."""
    moved = ffi.new("int64_t[]", steps)
    lib.kb_advance(ffi.cast("uint64_t *", word_address), steps, period_ns, moved)
    return list(moved)


def _bytes(pool: Pool) -> Any:
    return ffi.cast("uint8_t *", pool.ctypes.data)


def _check(result: int) -> None:
    if result:
        raise OSError(-result, "the stream broke")
