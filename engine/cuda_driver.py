"""CUDA's driver as this engine calls it: cuda-python's functions, whose error codes become exceptions.

Everything that torch does not offer goes through here: memory that other processes map, and host memory that a device
writes to.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from engine.errors import DeviceRefused, NoDevice

BINDINGS = "cuda.bindings.driver"


class CudaDriver:
    """`api`: the module `cuda.bindings.driver`, or what takes its place. Its functions return an error code and then
    what they are asked for. Any thread."""

    def __init__(self, api: Any) -> None:
        self.api = api

    def call(self, name: str, *arguments: Any) -> Any:
        """The one value that the function gives, or None. Raises DeviceRefused."""
        code, *values = getattr(self.api, name)(*arguments)
        if code != self.api.CUresult.CUDA_SUCCESS:
            raise DeviceRefused(f"{name}: {getattr(code, 'name', code)}")
        return values[0] if values else None

    def attribute(self, name: str, ordinal: int) -> int:
        """Of a device, by the part of its name behind CU_DEVICE_ATTRIBUTE_."""
        attribute = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", attribute, self.device(ordinal)))

    def device(self, ordinal: int) -> Any:
        self.call("cuInit", 0)
        return self.call("cuDeviceGet", ordinal)

    def pci_address(self, ordinal: int) -> str:
        """As sysfs spells it."""
        spelled: bytes = self.call("cuDeviceGetPCIBusId", 13, self.device(ordinal))
        return spelled.split(b"\0")[0].decode().lower()

    def tensor(self, address: int, count: int, dtype: torch.dtype, ordinal: int) -> torch.Tensor:
        """Elements at an address that the device can reach, which somebody else owns: a view."""
        return torch.as_tensor(_Elements(address, count, dtype), device=torch.device("cuda", ordinal))

    @contextmanager
    def on(self, ordinal: int) -> Iterator[None]:
        """Inside, the device's primary context is this thread's: the one that torch uses. It is never released, as
        torch keeps it as long as the process lives."""
        context = self.call("cuDevicePrimaryCtxRetain", self.device(ordinal))
        self.call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")


class _Elements:
    """Memory as torch, numba and cupy pass it to one another."""

    def __init__(self, address: int, count: int, dtype: torch.dtype) -> None:
        kind = {torch.uint8: "|u1", torch.int64: "<i8"}[dtype]
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": kind, "data": (address, False), "version": 3}


def installed_driver() -> CudaDriver:
    """Raises NoDevice where cuda-python is not installed."""
    if not find_spec("cuda") or not find_spec("cuda.bindings"):
        raise NoDevice("--device cuda needs cuda-python: pip install 'kvferry[gpu]'")
    return CudaDriver(importlib.import_module(BINDINGS))
