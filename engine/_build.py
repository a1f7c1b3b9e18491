"""Builds `engine._core`, the C kernels for CPUs (cffi, API mode, OpenMP).

`python -m engine._build` compiles in place; setuptools uses `cffi_modules=["engine/_build.py:ffi"]`. Needs a C compiler
with OpenMP (gcc or clang) and nothing else. Every variant of a kernel is in the one library: which of them runs is
chosen by the CPU it runs on, so nothing here depends on the machine that compiles.
"""

import os
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
CORE = Path("engine/core")
HEADERS = ("cpu.h", "attention.h", "dense.h")
"""What Python sees. cffi reads them too (lines that start with '#' are dropped): plain declarations only."""
SOURCES = (
    "cpu",
    "attention",
    "attention_places",
    "attention_units",
    "attention_portable",
    "attention_avx2",
    "attention_avx512",
    "dense",
    "dense_portable",
    "dense_avx2",
    "dense_avx512",
)

ffi = FFI()
for _header in HEADERS:
    ffi.cdef("\n".join(line for line in (ROOT / CORE / _header).read_text().splitlines() if not line.startswith("#")))
ffi.set_source(
    "engine._core",
    "\n".join(f'#include "{header}"' for header in HEADERS),
    sources=[str(CORE / f"{name}.c") for name in SOURCES],
    depends=[str(path.relative_to(ROOT)) for path in sorted((ROOT / CORE).glob("*.h"))],
    include_dirs=[str(CORE)],
    libraries=["m"],
    extra_compile_args=["-O3", "-std=gnu11", "-fopenmp", "-Wall", "-Wextra", "-Wno-psabi"],
    extra_link_args=["-fopenmp"],
)

if __name__ == "__main__":
    os.chdir(ROOT)
    ffi.compile(target="_core.abi3.so")  # the name that setuptools gives it, so that no second one can go stale
