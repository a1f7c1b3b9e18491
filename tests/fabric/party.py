"""One engine under test with the events it has reported, and the loop that drives several of them by turns."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from fabric.api import Event, MemoryRegion, PageWrites, RailKey, RemoteRegion, TransferEngine
from tests.fabric.shared_memory import Bytes, register_shared

E = TypeVar("E")
DEADLINE = 20.0
NOWHERE = RemoteRegion((RailKey(0, 1),), 0, 1 << 20)
"""Memory that nobody has registered."""


@dataclass
class Party:
    engine: TransferEngine
    events: list[Event] = field(default_factory=list)
    memories: list[Any] = field(default_factory=list)  # registered memory outlives its engine

    def memory(self, size: int, fill: int | None = None) -> tuple[Bytes, MemoryRegion]:
        """Registered bytes: all `fill`, or a pattern that differs between neighbouring pages."""
        data, region = register_shared(self.engine, size)
        data[:] = pattern(size) if fill is None else fill
        self.memories.append(data)
        return data, region

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]


def pattern(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def wrong_keys(remote: RemoteRegion) -> RemoteRegion:
    return replace(remote, keys=tuple(RailKey(rail, key ^ 1) for rail, key in remote.keys))


def pages(source: MemoryRegion, target: RemoteRegion, indices: list[int], length: int, immediate: int) -> PageWrites:
    """Page i of the source to page i of the target, for contiguous pages of `length` bytes."""
    return PageWrites(source, indices, length, 0, target, indices, length, 0, length, immediate)


def drive(*parties: Party, until: Callable[[], bool], deadline: float = DEADLINE) -> None:
    """Progresses all parties by turns until the condition holds; fails after `deadline` seconds."""
    end = time.monotonic() + deadline
    while not until():
        assert time.monotonic() < end, [
            (party.events, party.engine.counters(), party.engine.gauges()) for party in parties
        ]
        for party in parties:
            party.events += party.engine.progress(0.001)


def settle(*parties: Party, turns: int = 15) -> None:
    """Progresses all parties a fixed number of turns: for showing that nothing more happens."""
    for _ in range(turns):
        for party in parties:
            party.events += party.engine.progress(0.001)
