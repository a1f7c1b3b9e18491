"""Scheduling and chunking: the cases P01 to P09, as exact traces."""

import pytest

from engine.forward_batch import ForwardBatch
from engine.request import RequestStatus
from tests.engine.traces import Harness


def test_p01_a_prompt_of_exactly_the_budget_is_not_split() -> None:
    h = Harness(tokens=10)
    h.add("A", 10, 2)
    assert h.step() == "A10@0"
    assert h.generated("A") == 1
    assert h.run() == "A1@10"
    h.assert_at_rest()


def test_p02_one_token_more_takes_two_steps_and_the_first_yields_nothing() -> None:
    h = Harness(tokens=10)
    h.add("A", 11, 2)
    assert h.step() == "A10@0"
    assert h.generated("A") == 0
    assert h.run() == "A1@10 / A1@11"
    h.assert_at_rest()


def test_p03_a_long_prompt_shares_what_its_last_slice_leaves() -> None:
    h = Harness(tokens=10)
    h.add("A", 23, 3)
    h.add("B", 4, 3)
    assert h.run() == "A10@0 / A10@10 / A3@20 B4@0 / A1@23 B1@4 / A1@24 B1@5"
    h.assert_at_rest()


def test_p04_decodes_come_before_prompts() -> None:
    h = Harness(tokens=8)
    h.add("A", 4, 6)
    assert h.step() == "A4@0"
    h.add("B", 20, 3)
    assert h.run() == "A1@4 B7@0 / A1@5 B7@7 / A1@6 B6@14 / A1@7 B1@20 / A1@8 B1@21"
    h.assert_at_rest()


def test_p06_the_request_cap_holds_a_third_until_one_has_finished() -> None:
    h = Harness(tokens=16, max_requests_per_batch=2)
    for name in "ABC":
        h.add(name, 3, 2)
    assert h.run() == "A3@0 B3@0 / A1@3 B1@3 / C3@0 / C1@3"
    h.assert_at_rest()


def test_p07_never_more_query_tokens_than_the_budget() -> None:
    h = Harness(tokens=4)
    h.add("A", 4, 3)
    assert h.step() == "A4@0"
    for name in "BCDEF":
        h.add(name, 1, 3)
    assert h.run() == ("A1@4 B1@0 C1@0 D1@0 / A1@5 B1@1 C1@1 D1@1 / B1@2 C1@2 D1@2 E1@0 / E1@1 F1@0 / E1@2 F1@1 / F1@2")
    h.assert_at_rest()


def test_p08_a_small_request_passes_one_that_lacks_blocks() -> None:
    h = Harness(num_blocks=8)
    h.add("A", 20, 8)
    h.step()
    h.add("B", 16, 2)
    h.add("C", 4, 2)
    assert h.step() == "A1@20 C4@0"
    assert h.steps(6) == "A1@21 C1@4 / A1@22 / A1@23 / A1@24 / A1@25 / A1@26"
    assert h.gathered.ended.keys() == {"C", "A"}
    assert h.step() == "B16@0"
    h.run()
    h.assert_at_rest()


def test_p09_the_status_is_set_before_the_forward_runs() -> None:
    h = Harness(tokens=32)
    seen = []

    def look(_: ForwardBatch) -> None:
        request = h.requests["A"]
        seen.append((request.status, request.computed, len(request.prompt) - request.computed, request.generated))

    h.runner.on_run = look
    h.add("A", 5, 1)
    h.step()
    assert seen == [(RequestStatus.DECODING, 5, 0, 0)]
    seen.clear()
    h.add("A", 40, 1)
    h.step()
    assert seen == [(RequestStatus.PREFILLING, 32, 8, 0)]


def test_overtaking_is_bounded() -> None:
    """A request of 5 blocks waits while small ones keep 4 of 8 blocks busy; after 3 have passed, it holds the queue."""
    h = Harness(num_blocks=8, max_overtakes=3)
    h.add("long", 15, 30)
    h.step()
    h.add("big", 20, 1)
    small = [f"s{i}" for i in range(6)]
    for name in small:
        h.add(name, 3, 1)
    trace = h.run().split(" / ")
    assert trace[0] == "long1@15 s03@0 s13@0 s23@0"
    began = next(i for i, step in enumerate(trace) if "big20@0" in step)
    assert all("s33@0" not in step for step in trace[:began])
    assert h.gathered.ended.keys() == {"long", "big", *small}
    h.assert_at_rest()


def test_without_overtaking_a_request_that_does_not_fit_holds_the_queue_at_once() -> None:
    h = Harness(num_blocks=8, max_overtakes=0)
    h.add("long", 15, 3)
    h.step()
    h.add("big", 20, 1)
    h.add("small", 3, 1)
    assert h.run() == "long1@15 / long1@16 / big20@0 small3@0"
    h.assert_at_rest()


def test_requests_are_served_in_order_of_arrival() -> None:
    h = Harness(tokens=4)
    for name in "CAB":
        h.add(name, 4, 1)
    assert h.run() == "C4@0 / A4@0 / B4@0"


@pytest.mark.parametrize(("cap", "runs"), [(2, False), (3, True)])
def test_no_more_are_passed_over_than_a_forward_may_hold(cap: int, runs: bool) -> None:
    h = Harness(num_blocks=8, tokens=32, max_requests_per_batch=cap)
    h.add("A", 12, 8)
    h.step()
    for name in ("B", "C"):
        h.add(name, 24, 1)
    h.add("D", 4, 1)
    assert ("D" in h.step()) is runs
    h.run()
    assert {name: h.generated(name) for name in h.requests} == {"A": 8, "B": 1, "C": 1, "D": 1}
    h.assert_at_rest()
