"""A CUDA driver whose devices have host memory: an allocation is a memfd, an address is reserved and mapped as the real
one is. It refuses what the real one refuses in a right program: whatever is unknown, freed twice or of a wrong size."""

import ctypes
import mmap
import os
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch

from engine.cuda_driver import CudaDriver

GRANULARITY = 1 << 21
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED = 0x10


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED = 102
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING = 118


_OK = CUresult.CUDA_SUCCESS
_WRONG = (CUresult.CUDA_ERROR_INVALID_VALUE,)


class FakeApi:
    """Stands in for the module `cuda.bindings.driver`. `fails`: the function that does, next. Attributes can be set."""

    CUresult = CUresult
    CUdevice_attribute = CUdevice_attribute
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2

    def __init__(self) -> None:
        self.attributes = dict.fromkeys(CUdevice_attribute, 200)
        self.fails = ""
        self.created: list[Any] = []
        self.handles: set[int] = set()
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.registered: set[int] = set()
        self.contexts: list[int] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and object.__getattribute__(self, "fails") == name:
            self.fails = ""
            return _out_of_memory
        return object.__getattribute__(self, name)

    @property
    def nothing_left(self) -> bool:
        return not (self.handles or self.reserved or self.mapped or self.registered or self.contexts)

    CUmemAllocationProp: Callable[[], Any] = staticmethod(
        lambda: SimpleNamespace(location=SimpleNamespace(), allocFlags=SimpleNamespace())
    )
    CUmemAccessDesc: Callable[[], Any] = staticmethod(lambda: SimpleNamespace(location=SimpleNamespace()))

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (_OK,)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return _OK, ordinal

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> tuple[Any, ...]:
        return _OK, b"0000:1B:00.0\0"[:length]

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        return _OK, self.attributes[CUdevice_attribute(attribute)]

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return _OK, device

    def cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        self.contexts.append(context)
        return (_OK,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return _OK, self.contexts.pop()

    def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> tuple[Any, ...]:
        return _OK, GRANULARITY

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:
        if size % GRANULARITY or flags or properties.requestedHandleTypes != 1 or properties.type != 1:
            return _WRONG
        handle = os.memfd_create("fake-device-memory")
        os.ftruncate(handle, size)
        self.created.append(properties)
        self.handles.add(handle)
        return _OK, handle

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        if handle not in self.handles:
            return _WRONG
        self.handles.remove(handle)
        os.close(handle)
        return (_OK,)

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple[Any, ...]:
        return (_OK, os.dup(handle)) if handle in self.handles and kind == 1 and not flags else _WRONG

    def cuMemImportFromShareableHandle(self, fd: int, kind: int) -> tuple[Any, ...]:
        handle = os.dup(fd)
        self.handles.add(handle)
        return _OK, handle

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        reserved = _libc.mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.reserved[reserved] = size
        return _OK, reserved

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        if self.reserved.get(address) != size or address in self.mapped:
            return _WRONG
        del self.reserved[address]
        _libc.munmap(address, size)
        return (_OK,)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        known = self.reserved.get(address) == size and handle in self.handles
        if not known or os.fstat(handle).st_size != size or offset or flags:
            return _WRONG
        _libc.mmap(address, size, 0, mmap.MAP_SHARED | _MAP_FIXED, handle, 0)
        self.mapped[address] = size
        return (_OK,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        if self.mapped.get(address) != size:
            return _WRONG
        del self.mapped[address]
        _libc.mmap(address, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, 0)
        return (_OK,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any, ...]:
        if self.mapped.get(address) != size or len(access) != count:
            return _WRONG
        _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), access[0].flags)
        return (_OK,)

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[Any, ...]:
        if not self.contexts or address % mmap.PAGESIZE or address in self.registered or not flags & 2:
            return _WRONG
        self.registered.add(address)
        return (_OK,)

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:
        if address not in self.registered:
            return _WRONG
        self.registered.remove(address)
        return (_OK,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[Any, ...]:
        return (_OK, address) if address in self.registered else _WRONG


def _out_of_memory(*_: Any) -> tuple[Any, ...]:
    return (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)


class FakeDriver(CudaDriver):
    """Its devices' memory is the host's, for torch too."""

    api: FakeApi

    def __init__(self) -> None:
        super().__init__(FakeApi())

    def tensor(self, address: int, count: int, dtype: torch.dtype, ordinal: int) -> torch.Tensor:
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype)
