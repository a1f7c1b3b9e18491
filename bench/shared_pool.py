"""Memory of a memfd, so that the same-host path may carry it too."""

import fcntl
import mmap
import os

import numpy as np

from bench.native import Pool
from fabric.api import MemoryRegion, TransferEngine

PRIME = 100_003
"""Numbers before they come again: pages of no size are alike."""


class SharedPool:
    """`data`: touched, and no page as its neighbour."""

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("kvferry-bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, size)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        self.data: Pool = np.frombuffer(mmap.mmap(self._file, size), np.uint8)
        self.data[:] = np.resize(np.arange(PRIME, dtype=np.uint32).view(np.uint8), size)

    def register(self, engine: TransferEngine) -> MemoryRegion:
        """Once: the file is not kept, as the engine has a descriptor of its own."""
        region = engine.register(self.data.ctypes.data, self.data.nbytes, file=self._file)
        os.close(self._file)
        return region
