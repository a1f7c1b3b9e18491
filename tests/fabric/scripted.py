"""The C core, compiled over a provider that a script of this folder plays: for what no provider of a machine without a
NIC does, or tells of."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

from cffi import FFI

from fabric import _build


def compile_script(name: str, declared: str, folder: Path) -> Any:
    """The core's sources with `name`.c, as a library of its own that has the `declared` functions."""
    shutil.copytree(_build.ROOT / _build.CORE, folder / "core", ignore=shutil.ignore_patterns("*.o"))
    ffi = FFI()
    ffi.cdef(declared)
    ffi.set_source(
        name,
        (Path(__file__).parent / f"{name}.c").read_text(),
        sources=[str(folder / "core" / f"{source}.c") for source in _build.SOURCES],
        include_dirs=[str(folder / "core")],
        libraries=["fabric"],
        extra_compile_args=["-O0", "-std=gnu11"],
    )
    spec = importlib.util.spec_from_file_location(name, ffi.compile(tmpdir=str(folder)))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.lib
