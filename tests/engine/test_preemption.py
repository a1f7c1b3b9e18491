"""Who starts over when the pool is full."""

from engine.preemption import StalledRequest, choose_victims
from engine.request import Request
from protocol.sampling import SamplingParams


def stalled(name: str, held: int, missing: int = 1) -> StalledRequest:
    return StalledRequest(Request(name, [1], SamplingParams(max_new_tokens=1)), held, missing)


def names(victims: list[Request]) -> list[str]:
    return [request.id for request in victims]


def test_the_newest_is_chosen_first() -> None:
    assert names(choose_victims([stalled("old", 4), stalled("new", 4)], free=0, active=3)) == ["new"]


def test_as_many_as_let_the_others_go_on() -> None:
    requests = [stalled("A", 4, missing=2), stalled("B", 1), stalled("C", 1)]
    assert names(choose_victims(requests, free=0, active=4)) == ["C", "B"]
    assert names(choose_victims(requests, free=3, active=4)) == ["C"]


def test_one_active_request_always_remains() -> None:
    assert choose_victims([stalled("A", 4)], free=0, active=1) == []
    requests = [stalled("A", 1, missing=9), stalled("B", 1, missing=9)]
    assert names(choose_victims(requests, free=0, active=2)) == ["B"]


def test_only_stalled_requests_are_chosen() -> None:
    assert choose_victims([], free=0, active=5) == []
