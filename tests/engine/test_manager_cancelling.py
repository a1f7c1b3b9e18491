"""Cancelling at any moment: one terminal output, and nothing kept. P38, latent 4."""

from collections.abc import Callable

import pytest

from engine.manager import ContinuousBatchingManager
from protocol.messages import FinishReason
from tests.engine.managing import CANCELLED, FINISHED, Gate, asked, positions, result
from tests.engine.traces import Harness


@pytest.mark.parametrize("streaming", [False, True])
def test_cancelling_gives_one_terminal_output_with_the_tokens_so_far(harness: Harness, streaming: bool) -> None:
    gate = Gate(harness)
    with ContinuousBatchingManager(harness.engine) as manager:
        manager.submit(asked("A", new=50, streaming=streaming))
        gate.let(2)
        for _ in range(3):
            gate.reached()
        manager.cancel("A")
        manager.cancel("A")
        gate.let(50)
        *_, last = manager.stream("A")
        assert (last.status, last.finish_reason, last.error) == (CANCELLED, FinishReason.CANCELLED, None)
        assert last.generated_ids in {(4, 5, 6), (4, 5)}  # asynchronously, what is under way is dropped
    harness.assert_at_rest()


def test_cancelling_a_waiting_request_or_one_that_has_not_arrived(harness: Harness) -> None:
    manager = ContinuousBatchingManager(harness.engine)
    manager.submit(asked("A", new=50))
    manager.cancel("A")
    manager.cancel("nobody")
    with manager:
        assert (result(manager, "A").status, harness.engine.counters.batches) == (CANCELLED, 0)
    manager.cancel("A")


def test_a_cancelled_id_may_be_used_again(manager: ContinuousBatchingManager) -> None:
    for _ in range(20):
        manager.submit(asked("A", new=3))
        manager.cancel("A")
        result(manager, "A")
    manager.submit(asked("A", new=3))
    assert len(result(manager, "A").generated_ids) == 3


def fill_the_cache(manager: ContinuousBatchingManager, gate: Gate, made_room: Callable[[], int]) -> None:
    """A and B, until one of them had to make room."""
    for name in "AB":
        manager.submit(asked(name, prompt=6, new=6))
    while not made_room():
        gate.reached()
        gate.let(1)


def test_cancelling_all_that_runs_lets_the_waiting_go_on() -> None:
    """Latent problem 1: after a request had to make room, none is admitted until one has left, in whatever way."""
    harness = Harness(num_blocks=4, emit=positions)
    gate = Gate(harness)
    with ContinuousBatchingManager(harness.engine) as manager:
        fill_the_cache(manager, gate, lambda: harness.engine.counters.resets)
        manager.submit(asked("C"))
        manager.cancel("A")
        manager.cancel("B")
        gate.let(1000)
        assert result(manager, "C").status is FINISHED
        assert {result(manager, name).status for name in "AB"} == {CANCELLED}


def test_latent_4_ending_a_request_that_made_room_keeps_its_tokens() -> None:
    harness = Harness(num_blocks=4, emit=positions, host_blocks=8)
    gate = Gate(harness)
    with ContinuousBatchingManager(harness.engine) as manager:
        fill_the_cache(manager, gate, lambda: harness.engine.counters.offloads)
        manager.cancel("B")
        gate.let(1000)
        ended = result(manager, "B")
        assert ended.status is CANCELLED
        assert ended.generated_ids == tuple(range(6, 6 + len(ended.generated_ids))) != ()
    harness.assert_at_rest()
