"""KV in host memory: P35 to P37, and what becomes of it when requests end there."""

import pytest

from tests.engine.traces import T1, Harness


def three(host_blocks: int) -> Harness:
    """P34's requests."""
    h = Harness(num_blocks=8, tokens=32, host_blocks=host_blocks)
    for name in ("R0", "R1", "R2"):
        h.add(name, 8, 12)
    return h


def counts(h: Harness) -> tuple[int, int, int]:
    counters = h.engine.counters
    return counters.offloads, counters.restores, counters.resets


def test_p35_victims_are_copied_and_go_on_where_they_were() -> None:
    h = three(8)
    h.steps(12)
    assert counts(h) == (2, 0, 0)
    assert h.step() == "R21@8 R11@16"
    h.run()
    assert counts(h) == (2, 2, 0)
    assert {name: h.generated(name) for name in h.requests} == {"R0": 12, "R1": 12, "R2": 12}
    h.assert_at_rest()


@pytest.mark.parametrize(("host_blocks", "expected"), [(6, (2, 2, 0)), (5, (1, 1, 1))])
def test_p36_exactly_full_is_allowed_and_what_does_not_fit_starts_over(
    host_blocks: int, expected: tuple[int, int, int]
) -> None:
    h = three(host_blocks)
    h.run()
    assert counts(h) == expected
    assert {name: h.generated(name) for name in h.requests} == {"R0": 12, "R1": 12, "R2": 12}
    h.assert_at_rest()


def test_p37_offloaded_and_fresh_requests_take_turns_once_a_request_has_left() -> None:
    h = three(8)
    h.steps(3)
    h.add("F1", 4, 2)
    h.add("F2", 4, 2)
    for _ in range(9):
        assert "F" not in h.step()
    assert h.step() == "R21@8 F14@0 F24@0", "R1 lacks blocks"
    h.run()
    h.assert_at_rest()


def test_what_is_cancelled_in_host_memory_is_dropped_there() -> None:
    h = three(8)
    h.steps(3)
    store = h.engine.offload
    assert store is not None and store.free == 6
    h.engine.abort("R2")
    h.step()
    assert store.free == 8
    h.run()
    h.assert_at_rest()


def test_cancelling_all_active_requests_lets_the_offloaded_one_come_back() -> None:
    """Admissions are held after an offload; nothing must wait for a finish that never comes."""
    h = three(8)
    h.steps(3)
    for name in ("R0", "R1"):
        h.engine.abort(name)
    h.run()
    assert h.generated("R2") == 12
    h.assert_at_rest()


def test_rings_and_growing_tables_are_copied_together() -> None:
    """T1: three full blocks or one ring block a chunk. 7 chunks: A and B hold two ring blocks each."""
    h = Harness(num_blocks=5, geometry=T1, host_blocks=8)
    h.add("A", 10, 12)
    h.add("B", 10, 12)
    h.run()
    assert h.engine.counters.offloads > 0
    assert {name: h.generated(name) for name in h.requests} == {"A": 12, "B": 12}
    h.assert_at_rest()


def test_after_a_restore_full_blocks_are_shared_again() -> None:
    h = Harness(num_blocks=8, tokens=32, host_blocks=8, sharing=True, emit=lambda name, position: position)
    prompts = {"R0": 100, "R1": 200, "R2": 300}
    for name, first in prompts.items():
        h.add(name, list(range(first, first + 8)), 12)
    h.run()
    assert h.engine.counters.offloads > 0
    assert {name: h.generated(name) for name in h.requests} == {"R0": 12, "R1": 12, "R2": 12}
    h.assert_at_rest()
