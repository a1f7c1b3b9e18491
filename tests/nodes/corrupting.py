"""A fabric that damages one byte of every transfer just before its arrival is reported."""

import ctypes
from typing import Any, cast

import numpy as np

from fabric.api import Arrived, Event, MemoryRegion, TransferEngine
from fabric.libfabric import open_engine


class CorruptingEngine:
    """Everything of the engine inside, but for that byte, in the memory that was registered last."""

    def __init__(self, inner: TransferEngine) -> None:
        self._inner = inner
        self._region: MemoryRegion | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def register(
        self, address: int, length: int, device: int | None = None, file: int | None = None, file_offset: int = 0
    ) -> MemoryRegion:
        self._region = self._inner.register(address, length, device, file, file_offset)
        return self._region

    def progress(self, timeout: float) -> list[Event]:
        events = self._inner.progress(timeout)
        if any(isinstance(event, Arrived) for event in events):
            assert self._region is not None
            flip_first_written_byte(self._region)
        return events


def open_corrupting_decode(name: str) -> TransferEngine:
    """Over `net`; damaged is what decode nodes receive."""
    inner = open_engine("net")
    return cast(TransferEngine, CorruptingEngine(inner)) if name.startswith("decode") else inner


def flip_first_written_byte(region: MemoryRegion) -> None:
    """Free pages are all 0xFF in debug mode and the pool's first chunk is all 0, so the first other byte belongs to a
    page that was written."""
    memory = np.ctypeslib.as_array((ctypes.c_ubyte * region.length).from_address(region.address))
    memory[np.flatnonzero((memory != 0xFF) & (memory != 0))[0]] ^= 0x10
