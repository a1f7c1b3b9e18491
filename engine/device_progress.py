"""The progress word of a device: in the host's memory, where the messenger polls it, advanced by the device itself.

One word is one page of host memory that is pinned and mapped into the device's address space. `advance` enqueues an
addition of one on the current stream, or records it into the graph that is being captured there; a replay then adds
again. (A stream memory operation, cuStreamWriteValue64, would bake in the value that it writes.)

What it promises, layer by layer: the addition runs once all that was enqueued before it on the stream has ended, thus
behind the kernels that wrote the layer's KV and behind its output projection. What ended kernels wrote to the device's
memory is in its L2 cache or beyond, where a NIC's reads look too; and the NIC reads only once the host has seen the
word. The word is written by one kernel at a time, in one aligned store of 8 bytes.
"""

import mmap
from typing import Self

import torch

from engine.cuda_driver import CudaDriver
from engine.errors import DeviceRefused
from engine.progress import ProgressWord


class DeviceProgressWord(ProgressWord):
    """Of no use for forwards until `map`. However many of them are under way, it grows by one per layer of each, in the
    order in which they were launched."""

    def __init__(self, driver: CudaDriver, memory: mmap.mmap | None = None) -> None:
        """`memory`: as for any word; it may be shared with another process, which then polls it."""
        super().__init__(memory)
        self._driver = driver
        self._mapped: int | None = None
        self._on_device: torch.Tensor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def map(self, ordinal: int) -> None:
        """Pins the page and gives it to the device. Raises DeviceRefused."""
        api = self._driver.api
        with self._driver.on(ordinal):
            flags = api.CU_MEMHOSTREGISTER_DEVICEMAP | api.CU_MEMHOSTREGISTER_PORTABLE
            self._driver.call("cuMemHostRegister", self.address, mmap.PAGESIZE, flags)
            self._mapped = ordinal
            try:
                address = int(self._driver.call("cuMemHostGetDevicePointer", self.address, 0))
            except DeviceRefused:
                self.close()
                raise
        self._on_device = self._driver.tensor(address, 1, torch.int64, ordinal)

    def advance(self) -> None:
        """Of the device's doing, in the order of the current stream: it has not happened when this returns."""
        assert self._on_device is not None, "it is mapped"
        self._on_device.add_(1)

    def close(self) -> None:
        """Nothing that advances it may be under way. It can still be read. May be called again."""
        ordinal, self._mapped, self._on_device = self._mapped, None, None
        if ordinal is not None:
            with self._driver.on(ordinal):
                self._driver.call("cuMemHostUnregister", self.address)
