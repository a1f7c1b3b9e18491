"""What may be submitted to a manager, when, and under which id."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from engine.errors import InvalidRequest, LoopNotStarted, QueueFull
from engine.generation_output import GenerationRequest
from engine.manager import ContinuousBatchingManager, StopMode
from protocol.messages import FinishReason
from protocol.sampling import SamplingParams
from tests.engine.managing import DEADLINE_S, FAILED, FINISHED, asked, positions, result
from tests.engine.traces import Harness


def test_what_is_submitted_before_the_start_runs_after_it(harness: Harness) -> None:
    manager = ContinuousBatchingManager(harness.engine)
    manager.submit(asked("A"))
    with manager:
        assert result(manager, "A").status is FINISHED


def test_waiting_before_the_start_would_be_for_ever(harness: Harness) -> None:
    manager = ContinuousBatchingManager(harness.engine)
    manager.submit(asked("A"))
    for wait in (
        lambda: manager.generate_batch([[1]], SamplingParams(max_new_tokens=1)),
        lambda: manager.get_result("A"),
        lambda: manager.stream("A"),
        lambda: next(manager.results()),
    ):
        with pytest.raises(LoopNotStarted, match=r"use `with manager:`, or call manager\.start\(\)"):
            wait()
    manager.stop(StopMode.HARD)
    assert [output.status for output in manager.results()] == [FAILED]


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (asked("A", prompt=0), "empty"),
        (replace(asked("A"), prompt_ids=[-1]), "-1"),
        (replace(asked("A"), n=0), "0 sequences"),
        (replace(asked("A"), sampling=SamplingParams(max_new_tokens=-1)), "max_new_tokens"),
        (replace(asked("A"), sampling=SamplingParams(max_new_tokens=1, top_p=2.0)), "top_p"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(
    manager: ContinuousBatchingManager, wanted: GenerationRequest, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        manager.submit(wanted)
    assert list(manager.results()) == []


def test_a_prompt_that_can_never_fit_fails_and_others_run(manager: ContinuousBatchingManager) -> None:
    manager.submit(asked("big", prompt=300))
    manager.submit(asked("small"))
    big = result(manager, "big")
    assert (big.status, big.finish_reason, big.generated_ids) == (FAILED, FinishReason.ERROR, ())
    assert big.error is not None and "never fit" in big.error
    assert result(manager, "small").status is FINISHED


def test_an_id_is_taken_until_its_terminal_output_is(manager: ContinuousBatchingManager) -> None:
    for _ in range(2):
        with manager.pause():
            manager.submit(asked("A", new=1))
            manager.submit(asked("B", new=2))
            with pytest.raises(InvalidRequest, match="'A' is running already"):
                manager.submit(asked("A"))
        result(manager, "B")  # so A has ended too
        with pytest.raises(InvalidRequest, match="was not taken"):
            manager.submit(asked("A"))
        result(manager, "A")


def test_made_up_ids_avoid_those_in_use(manager: ContinuousBatchingManager) -> None:
    with manager.pause():
        manager.submit(asked("req_1"))
        assert [manager.submit(asked(None)) for _ in range(2)] == ["req_0", "req_2"]
    assert len(list(manager.results())) == 3


def test_a_bounded_queue_makes_submitters_wait_and_then_refuses() -> None:
    harness = Harness(emit=positions, max_queue_size=2)
    with ContinuousBatchingManager(harness.engine) as manager, ThreadPoolExecutor() as threads:
        with manager.pause():
            for name in "AB":
                manager.submit(asked(name))
            with pytest.raises(QueueFull, match="2 requests"):
                manager.submit(asked("C"), timeout_s=0)
            waiting = threads.submit(manager.submit, asked("D"))
        assert waiting.result(DEADLINE_S) == "D"
        assert {output.request_id for output in manager.results()} == {"A", "B", "D"}


def test_several_sequences_are_requests_of_their_own(manager: ContinuousBatchingManager) -> None:
    manager.submit(replace(asked("A", prompt=9, new=3), n=3))
    outputs = list(manager.results())
    assert {output.request_id: output.sequence_index for output in outputs} == {
        "A__child#1": 1,
        "A__child#2": 2,
        "A": 0,
    }
    assert [output.generated_ids for output in outputs] == [(9, 10, 11)] * 3
