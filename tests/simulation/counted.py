"""Each page is counted once, whichever rails its writes took: what an engine counts is compared with the writes
themselves, after each that lands and each fence of a rail."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tests.simulation.errors import Violation
from tests.simulation.flights import Flight


@dataclass(slots=True)
class _Expected:
    """`standing`: writes that count. `spoilt`: one landed whose immediate was lost, which nobody can know of."""

    landing: int
    immediate: int
    standing: list[Flight] = field(default_factory=list)
    spoilt: bool = False


class Counted:
    """What one engine should have counted. `counted`: what it has, by an expectation's handle."""

    def __init__(self, counted: Callable[[int], int]) -> None:
        self._counted = counted
        self._expected: dict[int, _Expected] = {}

    def expect(self, handle: int, landing: int, immediate: int) -> None:
        self._expected[handle] = _Expected(landing, immediate)

    def forget(self, handle: int) -> None:
        self._expected.pop(handle, None)

    def close(self, landing: int) -> None:
        self._expected = {handle: e for handle, e in self._expected.items() if e.landing != landing}

    def landed(self, landing: int, flight: Flight, lost: bool) -> None:
        """`lost`: its immediate was."""
        for handle, expected in self._of(landing, flight.immediate):
            if any(other.brings == flight.brings for other in expected.standing):
                raise Violation(f"a page of {flight.transfer} is counted twice")
            expected.spoilt |= lost
            expected.standing.append(flight)
            self._compare(handle, expected, flight.transfer)

    def fenced(self, landing: int, rails: Collection[int], again: Collection[int]) -> None:
        """Writes over those rails that their sender has no word of will come again, if they carry one of `again`."""
        for immediate in again:
            for handle, expected in self._of(landing, immediate):
                expected.standing = [f for f in expected.standing if f.completed or f.remote_rail not in rails]
                self._compare(handle, expected, f"what expects {immediate:#x}")

    def _of(self, landing: int, immediate: int) -> list[tuple[int, _Expected]]:
        wanted = landing, immediate
        return [(handle, e) for handle, e in self._expected.items() if (e.landing, e.immediate) == wanted]

    def _compare(self, handle: int, expected: _Expected, whose: str) -> None:
        counted, standing = self._counted(handle), len(expected.standing)
        if counted != standing and not expected.spoilt:
            raise Violation(f"{whose} has {counted} writes counted where {standing} stand")
