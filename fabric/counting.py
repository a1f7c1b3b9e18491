"""Counting immediates in plain Python: the rules of the C core's `immediates.c`, for the simulated fabric."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from fabric.api import Arrived, OverCounted
from fabric.errors import FabricUsageError
from fabric.immediates import unpack


class Tallies:
    """Writes over one rail, by immediate; of each slot's latest generation."""

    def __init__(self) -> None:
        self._by_slot: dict[int, tuple[int, int]] = {}

    def begin(self, immediate: int) -> None:
        slot, generation = unpack(immediate)
        if slot not in self._by_slot or self._by_slot[slot][0] != generation:
            self._by_slot[slot] = generation, 0

    def add(self, immediate: int) -> None:
        """Of an older generation than began last it changes nothing."""
        slot, generation = unpack(immediate)
        latest, count = self._by_slot[slot]
        if latest == generation:
            self._by_slot[slot] = latest, count + 1

    def of(self, immediate: int) -> int:
        slot, generation = unpack(immediate)
        latest, count = self._by_slot.get(slot, (0, 0))
        return count if latest == generation else 0


@dataclass(slots=True)
class Expectation:
    handle: int
    landing: int
    slot: int
    generation: int
    expected: int
    count: int = 0
    first_ns: int = 0
    last_ns: int = 0
    arrived: bool = False  # to be reported
    over: bool = False  # to be reported
    over_reported: bool = False


class ImmediateCounter:
    """Expectations by slot and by handle. Not thread-safe: the simulated network's lock guards it."""

    def __init__(self) -> None:
        self._by_slot: dict[int, Expectation] = {}
        self._by_handle: dict[int, Expectation] = {}
        self._by_rail: defaultdict[tuple[int, int], Tallies] = defaultdict(Tallies)  # (landing, rail)
        self.counted = self.stale = self.over_counts = 0

    def __len__(self) -> int:
        return len(self._by_handle)

    def expect(self, landing: int, handle: int, immediate: int, count: int) -> None:
        slot, generation = unpack(immediate)
        if slot in self._by_slot:
            raise FabricUsageError(f"transfer slot {slot} is armed already")
        self._by_slot[slot] = self._by_handle[handle] = Expectation(handle, landing, slot, generation, count)

    def find(self, handle: int) -> Expectation:
        if handle not in self._by_handle:
            raise FabricUsageError(f"no expectation {handle}")
        return self._by_handle[handle]

    def revise(self, handle: int, count: int) -> None:
        expectation = self.find(handle)
        expectation.expected = count
        self._judge(expectation)

    def forget(self, handle: int) -> Expectation | None:
        """None for a handle that is not known (any more)."""
        expectation = self._by_handle.pop(handle, None)
        if expectation is not None:
            del self._by_slot[expectation.slot]
        return expectation

    def drop(self, landing: int) -> None:
        for expectation in [e for e in self._by_handle.values() if e.landing == landing]:
            self.forget(expectation.handle)
        for key in [key for key in self._by_rail if key[0] == landing]:
            del self._by_rail[key]

    def take_back(self, landing: int, rails: Collection[int], immediate: int, completed: int) -> bool:
        """Whether writes in doubt on those rails, now fenced, must come again: then none is counted but those that
        have completed. A count is never raised on a peer's word."""
        expectation = self._live(landing, immediate)
        if expectation is None or expectation.count >= expectation.expected:
            return False
        expectation.count -= max(0, sum(self._by_rail[landing, rail].of(immediate) for rail in rails) - completed)
        return True

    def _live(self, landing: int, immediate: int) -> Expectation | None:
        slot, generation = unpack(immediate)
        found = self._by_slot.get(slot)
        return found if found is not None and (found.landing, found.generation) == (landing, generation) else None

    def count(self, landing: int, rail: int, immediate: int, now: int) -> None:
        """A write carrying `immediate` landed. A wrong generation or landing is stale and changes nothing else."""
        expectation = self._live(landing, immediate)
        if expectation is None:
            self.stale += 1
            return
        self._by_rail[landing, rail].begin(immediate)
        self._by_rail[landing, rail].add(immediate)
        self.counted += 1
        expectation.count += 1
        expectation.first_ns = expectation.first_ns or now
        expectation.last_ns = now
        self.over_counts += expectation.count > expectation.expected
        self._judge(expectation)

    @staticmethod
    def _judge(expectation: Expectation) -> None:
        expectation.arrived = expectation.count == expectation.expected
        expectation.over = expectation.count > expectation.expected and not expectation.over_reported

    def take_events(self) -> list[Arrived | OverCounted]:
        events: list[Arrived | OverCounted] = []
        for e in self._by_handle.values():
            if e.over:
                events.append(OverCounted(e.handle, e.count))
                e.over_reported = True
            elif e.arrived:
                events.append(Arrived(e.handle, e.count, e.first_ns, e.last_ns))
            e.arrived = e.over = False
        return events
