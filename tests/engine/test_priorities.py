"""Who is admitted first, and the order of waiting."""

from engine.request import Request
from engine.waiting import WaitingQueue
from protocol.sampling import SamplingParams
from tests.engine.traces import Harness


def request(name: str, priority: int = 0, offloaded: bool = False) -> Request:
    made = Request(name, [1], SamplingParams(max_new_tokens=1), priority=priority)
    made.offloaded = offloaded
    return made


def queue_of(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue()
    for made in requests:
        queue.append(made)
    return queue


def test_lower_priorities_come_first_and_equal_ones_in_order_of_arrival() -> None:
    queue = queue_of(request("b", 1), request("a", 0), request("c", 1), request("urgent", -3))
    assert [r.id for r in queue] == ["urgent", "a", "b", "c"]
    assert len(queue) == 4


def test_offloaded_and_fresh_ones_take_turns() -> None:
    fresh, offloaded = [request(f"f{i}") for i in range(4)], [request(f"o{i}", offloaded=True) for i in range(2)]
    assert [r.id for r in queue_of(*fresh, *offloaded)] == ["o0", "f0", "o1", "f1", "f2", "f3"]


def test_one_that_left_or_never_was_there_is_ignored() -> None:
    first, second = request("a"), request("b", 2)
    queue = queue_of(first, second)
    queue.discard(first)
    queue.discard(first)
    queue.discard(request("b", 2))
    assert [r.id for r in queue] == ["b"]
    assert second in queue and first not in queue


def test_an_urgent_request_starts_before_those_that_came_earlier() -> None:
    h = Harness(tokens=4)
    for name, priority in (("A", 0), ("B", 0), ("urgent", -1)):
        made = h.make(name, 4, 1)
        made.priority = priority
        h.engine.add(made)
    assert h.run() == "urgent4@0 / A4@0 / B4@0"
