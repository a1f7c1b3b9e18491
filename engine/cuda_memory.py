"""Memory of a CUDA device that other processes can map and that NICs can be given.

The owner allocates it and hands a descriptor to whom it trusts, over a socket, as is done with a memfd. Each process
that maps it has its own address, and its own `close`; the memory is gone once every mapping and descriptor is.

    allocate -> export -> a descriptor -> map_shared (another process)
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch

from engine.cuda_driver import CudaDriver
from engine.errors import DeviceRefused

_IN_ORDER = 100
"""CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: what a NIC wrote before its completion was seen, kernels that are launched
afterwards see."""


class DeviceMemory:
    """`size` bytes at `address`, a multiple of the device's granularity; not zeroed. Made by `allocate` and
    `map_shared`. Whoever gave the address to a NIC takes it back before `close`, and no tensor of it is used after."""

    def __init__(self, driver: CudaDriver, ordinal: int, handle: Any, address: int, size: int, undo: ExitStack) -> None:
        self.ordinal = ordinal
        self.address = address
        self.size = size
        self._driver = driver
        self._handle = handle
        self._undo = undo

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def export(self) -> int:
        """A new descriptor, the caller's to close; the memory outlives `close` as long as it is open."""
        return int(self._driver.call("cuMemExportToShareableHandle", self._handle, _posix(self._driver), 0))

    def tensor(self) -> torch.Tensor:
        """All of it, as bytes."""
        return self._driver.tensor(self.address, self.size, torch.uint8, self.ordinal)

    def close(self) -> None:
        """Nothing may be running that uses it. May be called again."""
        self._undo.close()


def allocate(driver: CudaDriver, ordinal: int, size: int) -> DeviceMemory:
    """At least `size` bytes. Raises DeviceRefused with what the device lacks."""
    _check_device(driver, ordinal)
    properties = _properties(driver, ordinal)
    minimum = driver.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granularity = int(driver.call("cuMemGetAllocationGranularity", properties, minimum))
    rounded = -(-size // granularity) * granularity
    return _mapped(driver, ordinal, rounded, lambda: driver.call("cuMemCreate", rounded, properties, 0))


def map_shared(driver: CudaDriver, ordinal: int, fd: int, size: int) -> DeviceMemory:
    """What another process exported; `size` as it is there. `fd` stays the caller's. Raises DeviceRefused."""
    driver.device(ordinal)
    return _mapped(driver, ordinal, size, lambda: driver.call("cuMemImportFromShareableHandle", fd, _posix(driver)))


def _mapped(driver: CudaDriver, ordinal: int, size: int, obtain: Callable[[], Any]) -> DeviceMemory:
    """Undone in reverse, also where a step in the middle fails."""
    with ExitStack() as undo:
        handle = obtain()
        undo.callback(driver.call, "cuMemRelease", handle)
        address = driver.call("cuMemAddressReserve", size, 0, 0, 0)
        undo.callback(driver.call, "cuMemAddressFree", address, size)
        driver.call("cuMemMap", address, size, 0, handle, 0)
        undo.callback(driver.call, "cuMemUnmap", address, size)
        driver.call("cuMemSetAccess", address, size, [_access(driver, ordinal)], 1)
        return DeviceMemory(driver, ordinal, handle, int(address), size, undo.pop_all())


def _check_device(driver: CudaDriver, ordinal: int) -> None:
    """Raises DeviceRefused where pages could not be shared with other processes and NICs."""
    for attribute, lacking in (
        ("VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED", "virtual memory management"),
        ("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "memory that other processes can map"),
    ):
        if not driver.attribute(attribute, ordinal):
            raise DeviceRefused(f"CUDA device {ordinal} has no {lacking}")


def can_reach_nic(driver: CudaDriver, ordinal: int) -> str | None:
    """Why a NIC cannot read and write this device's memory directly; None if it can.

    The device has to order what a NIC writes before kernels that are launched later, by itself: nothing here flushes.
    """
    if not driver.attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", ordinal):
        return f"CUDA device {ordinal} does not offer GPUDirect RDMA for memory of its virtual memory management"
    if driver.attribute("GPU_DIRECT_RDMA_WRITES_ORDERING", ordinal) < _IN_ORDER:
        return f"CUDA device {ordinal} does not order what a NIC writes before the kernels that read it"
    return None


def _properties(driver: CudaDriver, ordinal: int) -> Any:
    api = driver.api
    properties = api.CUmemAllocationProp()
    properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.requestedHandleTypes = _posix(driver)
    properties.allocFlags.gpuDirectRDMACapable = int(can_reach_nic(driver, ordinal) is None)
    return properties


def _access(driver: CudaDriver, ordinal: int) -> Any:
    api = driver.api
    access = api.CUmemAccessDesc()
    access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _posix(driver: CudaDriver) -> Any:
    return driver.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
