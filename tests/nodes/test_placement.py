"""Which engine gets a request: the one with the fewest, and the same one for the same request."""

from decode_node.placement import Placement


def test_requests_go_to_the_engine_with_the_fewest() -> None:
    placement = Placement(3)
    assert [placement.place(name) for name in "abcd"] == [0, 1, 2, 0]
    placement.leave("b")
    assert placement.place("e") == 1


def test_a_request_that_comes_twice_meets_itself() -> None:
    placement = Placement(2)
    assert placement.place("a") == placement.place("a") == 0
    placement.leave("a")
    placement.leave("a")
    assert [placement.place(name) for name in "bc"] == [0, 1]


def test_the_end_of_a_request_that_came_twice_leaves_the_one_that_runs_its_place() -> None:
    placement = Placement(2)
    first = placement.place("a")
    placement.place("a")
    placement.leave("a")  # the second one was refused
    assert placement.place("b") != first
    assert placement.place("a") == first
    for _ in range(3):
        placement.leave("a")
    assert placement.place("c") == first
