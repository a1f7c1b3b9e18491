"""The compiled core, loaded on first use, and its records turned into ours."""

import os
from functools import cache
from typing import Any, NamedTuple

from fabric.errors import FabricUnavailable, OperationError

# What libfabric reads once, when it loads its providers; what the user has set wins.
_ENVIRONMENT = {
    # libfabric loads the PSM libraries where they are installed; their SIGSEGV handler turns a crash into exit(1)
    "IPATH_NO_BACKTRACE": "1",
    "HFI_NO_BACKTRACE": "1",
    # bounce buffers for messages, which we never send: 68 MiB and 60 ms for each endpoint, 8 MiB and 7 ms so (1.17)
    "FI_OFI_RXM_BUFFER_SIZE": "1024",
    "FI_OFI_RXM_EAGER_LIMIT": "1024",
}


class Core(NamedTuple):
    """cffi's handles of `fabric._core`. Its functions release the GIL."""

    ffi: Any
    lib: Any


@cache
def core() -> Core:
    """Raises FabricUnavailable where the extension was not built or libfabric cannot be loaded."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from fabric import _core
    except ImportError as error:
        raise FabricUnavailable(
            f"the libfabric extension cannot be loaded ({error}): install libfabric with its headers and a C compiler "
            "(Debian: libfabric-dev gcc), then run `python -m fabric._build`"
        ) from error
    return Core(_core.ffi, _core.lib)


def text(field: Any) -> str:
    """A C string field, decoded."""
    raw: bytes = core().ffi.string(field)
    return raw.decode(errors="replace")


def describe(error: Any) -> str:
    """A kf_error in words, for exceptions."""
    return f"{text(error.call)}: {text(error.text)} [{error.code}]"


def operation_error(error: Any, peer: str) -> OperationError | None:
    """A kf_error as a value, or None where its code says that there was none."""
    if not error.code:
        return None
    return OperationError(text(error.call), error.code, text(error.text), text(error.provider), peer)
