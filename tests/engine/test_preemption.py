"""Who starts over when the pool is full."""

from collections.abc import Sequence

from engine.preemption import StalledRequest, choose_victims
from engine.request import Request
from protocol.sampling import SamplingParams


def stalled(name: str, held: int, missing: int = 1, priority: int = 0) -> StalledRequest:
    request = Request(name, [1], SamplingParams(max_new_tokens=1), priority=priority)
    return StalledRequest(request, (held,), (missing,))


def victims(requests: list[StalledRequest], free: int, active: int) -> list[str]:
    """With one group of blocks, of which `free` are free."""

    def fits(given: Sequence[int], wanted: Sequence[int]) -> bool:
        return wanted[0] <= free + given[0]

    return [victim.request.id for victim in choose_victims(requests, fits, active)]


def test_the_newest_is_chosen_first() -> None:
    assert victims([stalled("old", 4), stalled("new", 4)], free=0, active=3) == ["new"]


def test_as_many_as_let_the_others_go_on() -> None:
    requests = [stalled("A", 4, missing=2), stalled("B", 1), stalled("C", 1)]
    assert victims(requests, free=0, active=4) == ["C", "B"]
    assert victims(requests, free=3, active=4) == ["C"]


def test_one_active_request_always_remains() -> None:
    assert victims([stalled("A", 4)], free=0, active=1) == []
    requests = [stalled("A", 1, missing=9), stalled("B", 1, missing=9)]
    assert victims(requests, free=0, active=2) == ["B"]


def test_only_stalled_requests_are_chosen() -> None:
    assert victims([], free=0, active=5) == []


def test_the_least_urgent_is_chosen_before_the_newest() -> None:
    requests = [stalled("old", 4, priority=1), stalled("new", 4, priority=0)]
    assert victims(requests, free=0, active=3) == ["old"]
