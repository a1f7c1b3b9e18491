"""The compiled kernels, loaded on first use."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch  # noqa: F401  its libgomp must be the one that is mapped: two OpenMP runtimes would fight over the cores

from engine.errors import KernelsUnavailable

_MAPS = Path("/proc/self/maps")


class Core(NamedTuple):
    """cffi's handles of `engine._core`. Its functions release the GIL."""

    ffi: Any
    lib: Any


@cache
def core() -> Core:
    """Raises KernelsUnavailable where the extension was not built or would bring an OpenMP of its own."""
    try:
        import engine._core as _core
    except ImportError as error:
        raise KernelsUnavailable(
            f"the C kernels cannot be loaded ({error}): install a C compiler, then run `python -m engine._build`"
        ) from error
    runtimes = openmp_runtimes()
    if len(runtimes) > 1:
        raise KernelsUnavailable(f"two OpenMP runtimes are mapped: {', '.join(sorted(runtimes))}")
    return Core(_core.ffi, _core.lib)


def openmp_runtimes() -> set[str]:
    """Paths of the libgomps that this process has mapped; empty where the system does not say."""
    if not _MAPS.exists():
        return set()
    paths = (line.split(maxsplit=5)[5:] for line in _MAPS.read_text().splitlines())
    return {path[0] for path in paths if path and "libgomp" in path[0]}
