"""Builds `fabric._core`, the C core over libfabric (cffi, API mode).

`python -m fabric._build` compiles in place; setuptools uses `cffi_modules=["fabric/_build.py:ffi"]`. Needs a C
compiler and libfabric's headers; a libfabric outside the system's folders is named through CFLAGS and LDFLAGS.
"""

import os
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
CORE = Path("fabric/core")
SAME_HOST = ("same_host_socket", "same_host_memory", "same_host_sender", "same_host_receiver")
RAILS = ("provider", "device_memory", "endpoint", "doubt", "batch", "words", "immediates", "posting")
SOURCES = (*RAILS, "acknowledging", "progress", "relay", *SAME_HOST)

ffi = FFI()
_header = (ROOT / CORE / "core.h").read_text()
ffi.cdef("\n".join(line for line in _header.splitlines() if not line.startswith("#")))
ffi.set_source(
    "fabric._core",
    '#include "core.h"',
    sources=[str(CORE / f"{name}.c") for name in SOURCES],
    depends=[str(CORE / "core.h"), str(CORE / "internal.h"), str(CORE / "same_host.h")],
    include_dirs=[str(CORE)],
    libraries=["fabric", "dl"],
    extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Wno-unused-parameter"],
)

if __name__ == "__main__":
    os.chdir(ROOT)
    ffi.compile(target="_core.abi3.so")  # the name that setuptools gives it, so that no second one can go stale
