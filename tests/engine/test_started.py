"""A step tells who left the waiting line, each request once."""

from itertools import chain

from tests.engine.traces import Harness


def started(harness: Harness) -> list[str]:
    """In the order of the steps, until nothing would happen."""
    steps = []
    while harness.engine.has_work:
        steps.append(harness.engine.step().started)
    return list(chain.from_iterable(steps))


def test_a_request_starts_with_its_first_chunk() -> None:
    h = Harness(tokens=4)
    h.add("A", 10, 1)
    h.add("B", 4, 1)
    assert [h.engine.step().started for _ in range(4)] == [["A"], [], ["B"], []]


def test_starting_over_is_no_second_start() -> None:
    h = Harness(num_blocks=4)
    h.add("A", 6, 6)
    h.add("B", 6, 6)
    assert started(h) == ["A", "B"]
    assert h.engine.counters.resets == 1


def test_what_is_forked_off_starts_too() -> None:
    h = Harness()
    h.engine.add(h.make("A", 9, 2, n=2))
    assert started(h) == ["A", "A__child#1"]
