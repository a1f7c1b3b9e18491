"""Builds `bench._core`, what the benchmarks need in C (cffi, API mode).

`python -m bench._build` compiles in place; setuptools uses `cffi_modules=["bench/_build.py:ffi"]`. Needs a C compiler.
"""

import os
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
CORE = Path("bench/core")

ffi = FFI()
_header = (ROOT / CORE / "bench.h").read_text()
ffi.cdef("\n".join(line for line in _header.splitlines() if not line.startswith("#")))
ffi.set_source(
    "bench._core",
    '#include "bench.h"',
    sources=[str(CORE / "bench.c")],
    depends=[str(CORE / "bench.h")],
    include_dirs=[str(CORE)],
    extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wextra"],
)

if __name__ == "__main__":
    os.chdir(ROOT)
    ffi.compile(target="_core.abi3.so")  # the name that setuptools gives it, so that no second one can go stale
