"""A full pool: who stalls, who starts over, who fails. P34, P39, B10, B15."""

import pytest

from engine.errors import CapacityExceeded
from engine.geometry import AttentionType, CacheGeometry, LayerGroup
from protocol.messages import FailureCode, FinishReason
from tests.engine.traces import Harness


def test_p34_the_newest_stalled_starts_over_and_goes_to_the_end() -> None:
    h = Harness(num_blocks=8, tokens=32)
    for name in ("R0", "R1", "R2"):
        h.add(name, 8, 12)
    assert h.steps(2) == "R08@0 R18@0 R28@0 / R01@8 R11@8"
    assert h.engine.counters.resets == 1
    h.steps(7)
    assert h.step() == "R01@16"
    assert h.engine.counters.resets == 2
    h.steps(2)
    assert list(h.gathered.ended) == ["R0"]
    assert h.gathered.steps == 12
    assert h.step() == "R29@0 R117@0"
    h.steps(2)
    assert list(h.gathered.ended) == ["R0", "R1"]
    h.run()
    assert h.gathered.steps == 23
    assert {name: h.generated(name) for name in h.requests} == {"R0": 12, "R1": 12, "R2": 12}
    assert all(len(request.prompt) == 8 for request in h.requests.values())
    h.assert_at_rest()


def test_b10_a_long_prompt_is_not_started_and_reset_over_and_over() -> None:
    h = Harness(num_blocks=8, tokens=4)
    h.add("A", 4, 24)
    h.add("B", 20, 4)
    h.steps(24)
    assert list(h.gathered.ended) == ["A"]
    h.run()
    assert (h.engine.counters.resets, h.gathered.steps) == (1, 32)
    h.assert_at_rest()


def test_b15_the_next_slice_of_a_prompt_without_room_is_reset() -> None:
    h = Harness(num_blocks=4, tokens=4)
    h.add("A", 4, 8)
    h.steps(5)
    h.add("B", 10, 3)
    assert h.step() == "A1@8 B3@0"
    h.steps(2)
    assert list(h.gathered.ended) == ["A"]
    h.run()
    assert (h.engine.counters.resets, h.gathered.steps) == (1, 13)
    h.assert_at_rest()


def test_nothing_new_starts_after_a_reset_until_a_request_leaves() -> None:
    h = Harness(num_blocks=8, tokens=32)
    for name in ("R0", "R1", "R2"):
        h.add(name, 8, 12)
    h.steps(3)
    h.add("new", 4, 2)
    assert h.step() == "R01@10 R11@10"
    h.engine.abort("R1")
    assert h.step() == "R01@11 R29@0 new4@0"


def test_the_hold_on_admissions_ends_when_nothing_is_active() -> None:
    h = Harness(num_blocks=8, tokens=32)
    for name in ("R0", "R1", "R2"):
        h.add(name, 8, 12)
    h.steps(2)
    h.engine.abort("R0")
    h.engine.abort("R1")
    assert h.step() == "R29@0"


def test_p39a_a_prompt_larger_than_the_cache_does_not_disturb_others() -> None:
    h = Harness(num_blocks=8)
    h.add("small", 4, 2)
    with pytest.raises(CapacityExceeded):
        h.add("big", 33, 1)
    h.run()
    assert h.generated("small") == 2
    h.assert_at_rest()


def test_p39b_a_lone_request_that_outgrows_the_cache_fails_alone_with_its_tokens() -> None:
    h = Harness(num_blocks=3)
    h.add("big", 9, 6)
    h.add("small", 2, 1)
    h.run()
    ended = h.gathered.ended["big"]
    assert ended.reason is FinishReason.ERROR
    assert ended.failure is not None
    assert ended.failure.code is FailureCode.CAPACITY
    assert (ended.generated, h.generated("big")) == (4, 4)
    assert h.gathered.ended["small"].reason is FinishReason.LENGTH
    h.assert_at_rest()


def test_p39c_one_that_just_fits_finishes() -> None:
    h = Harness(num_blocks=3)
    h.add("big", 9, 4)
    h.run()
    assert h.gathered.ended["big"].reason is FinishReason.LENGTH
    h.assert_at_rest()


def test_a_lone_stalled_request_waits_while_pages_are_in_quarantine() -> None:
    h = Harness(num_blocks=3)
    h.reserve("remote", 4, 2)
    h.add("A", 7, 4)
    h.steps(2)
    h.engine.quarantine("remote")
    assert h.step() == ""
    assert not h.engine.has_work
    assert h.engine.waiting + h.engine.running == 1
    h.engine.free_quarantined("remote", 1)
    assert h.run() == "A1@8 / A1@9"
    assert h.generated("A") == 4
    assert h.engine.counters.resets == 0
    h.assert_at_rest()


def test_requests_that_wait_for_kv_are_never_victims() -> None:
    h = Harness(num_blocks=6, tokens=32)
    reserved = h.reserve("remote", 8, 2)
    h.add("A", 8, 6)
    h.add("B", 8, 6)
    h.steps(3)
    assert h.engine.counters.resets == 1
    assert h.blocks("remote") == len(reserved)
    h.engine.resume("remote", computed=7)
    h.run()
    assert {name: h.generated(name) for name in ("remote", "A", "B")} == {"remote": 2, "A": 6, "B": 6}
    h.assert_at_rest()


SCATTERING = CacheGeometry(
    page_size=5,
    kv_heads=1,
    head_dim=8,
    dtype="float32",
    groups=(LayerGroup(AttentionType.FULL, (3, 4)), LayerGroup(AttentionType.SLIDING, (0, 1, 2), window=9)),
)
"""A chunk is 3 full blocks or 2 sliding ones."""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_alone_whose_blocks_lie_scattered_is_packed_and_goes_on(asynchronous: bool) -> None:
    """What others left behind keeps its ring in two half-empty chunks: each could hold all of it."""
    h = Harness(num_blocks=3, geometry=SCATTERING, asynchronous=asynchronous)
    h.add("A", 2, 3)
    h.add("B", 8, 14)
    h.run()
    assert {name: h.generated(name) for name in h.requests} == {"A": 3, "B": 14}
    h.assert_at_rest()
