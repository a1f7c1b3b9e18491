"""What pyproject.toml cannot say: the C extensions are built by cffi, and may be absent.

A router needs no libfabric. Where its headers (or a compiler) are missing the build warns and goes on; nodes then
refuse to start and `kvferry doctor` explains. Without the kernels the engine runs in plain torch, slower.
"""

from setuptools import setup
from setuptools.command.build_ext import build_ext


class OptionalExtension(build_ext):
    def run(self) -> None:
        for extension in self.extensions:
            extension.optional = True
        super().run()


setup(
    cffi_modules=["fabric/_build.py:ffi", "engine/_build.py:ffi", "bench/_build.py:ffi"],
    cmdclass={"build_ext": OptionalExtension},
)
