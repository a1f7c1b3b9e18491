"""Memory that peers on this host can be given to read: bytes of a memfd."""

import mmap
import os

import numpy as np
import numpy.typing as npt

from fabric.api import MemoryRegion, TransferEngine

Bytes = npt.NDArray[np.uint8]


def register_shared(engine: TransferEngine, size: int) -> tuple[Bytes, MemoryRegion]:
    """Zeroed, and registered. The engine keeps a descriptor of its own, the array the mapping."""
    file = os.memfd_create("kvferry-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        data = np.frombuffer(mmap.mmap(file, size), np.uint8)
        return data, engine.register(data.ctypes.data, size, file=file)
    finally:
        os.close(file)
