"""What a request's outputs say, whole and as streams. P38, P40."""

from dataclasses import replace

import pytest

from engine.errors import UnknownRequest
from engine.manager import ContinuousBatchingManager
from engine.request import RequestStatus
from protocol.messages import FinishReason
from tests.engine.managing import FINISHED, asked, positions, result
from tests.engine.traces import Harness


def test_a_request_has_one_output_that_says_all(harness: Harness) -> None:
    times = iter(range(100))
    with ContinuousBatchingManager(harness.engine, clock=lambda: float(next(times))) as manager:
        manager.submit(replace(asked("A", prompt=3, new=2), record_timestamps=True))
        output = result(manager, "A")
    assert (output.request_id, output.prompt_ids, output.generated_ids) == ("A", (2, 3, 4), (3, 4))
    assert (output.status, output.finish_reason, output.error) == (FINISHED, FinishReason.LENGTH, None)
    assert output.timestamps is not None and output.logprobs is None
    started, ended = output.lifespan
    assert started is not None and ended is not None
    assert output.created_time < started <= output.timestamps[0] < output.timestamps[1] == ended


def test_a_request_starts_with_its_first_chunk_not_with_its_first_token() -> None:
    harness = Harness(emit=positions, tokens=4)
    steps = iter(range(100))
    with ContinuousBatchingManager(harness.engine, clock=lambda: float(next(steps))) as manager:
        manager.submit(replace(asked("A", prompt=12, new=1), record_timestamps=True))
        output = result(manager, "A")
    created = output.created_time
    assert (output.lifespan, output.timestamps) == ((created + 1, created + 3), (created + 3,))


def test_timestamps_are_for_those_who_ask(manager: ContinuousBatchingManager) -> None:
    manager.submit(asked("A"))
    assert result(manager, "A").timestamps is None


def test_p40_a_stream_grows_by_one_and_only_its_last_output_is_terminal(manager: ContinuousBatchingManager) -> None:
    manager.submit(asked("A", prompt=4, new=3, streaming=True))
    outputs = list(manager.stream("A"))
    assert [output.generated_ids for output in outputs] == [(4,), (4, 5), (4, 5, 6)]
    assert [output.is_terminal for output in outputs] == [False, False, True]
    assert [output.status for output in outputs] == [RequestStatus.DECODING, RequestStatus.DECODING, FINISHED]
    with pytest.raises(UnknownRequest):
        manager.get_result("A")


@pytest.mark.parametrize("host_blocks", [0, 8], ids=["soft reset", "offload"])
def test_p40_making_room_for_others_shows_in_nothing(host_blocks: int) -> None:
    harness = Harness(num_blocks=4, emit=positions, host_blocks=host_blocks)
    with ContinuousBatchingManager(harness.engine) as manager, manager.pause():
        for name in "AB":
            manager.submit(asked(name, prompt=6, new=6, streaming=True))
    counters = harness.engine.counters
    assert (counters.offloads, counters.resets) == ((1, 0) if host_blocks else (0, 1))
    for name in "AB":
        outputs = list(manager.stream(name))
        assert [output.generated_ids for output in outputs] == [tuple(range(6, 7 + i)) for i in range(6)]
        assert {output.prompt_ids for output in outputs} == {(2, 3, 4, 5, 6, 7)}


def test_p38_a_limit_of_no_tokens_is_an_empty_output(manager: ContinuousBatchingManager) -> None:
    manager.submit(asked("A", new=0, streaming=True))
    (output,) = manager.stream("A")
    assert (output.generated_ids, output.status, output.lifespan.started) == ((), FINISHED, None)


@pytest.mark.parametrize("streaming", [False, True])
def test_p38_an_end_token_is_the_last_of_the_output(streaming: bool) -> None:
    harness = Harness(emit=positions, eos=[7, 9])
    with ContinuousBatchingManager(harness.engine) as manager:
        manager.submit(asked("A", prompt=5, new=10, streaming=streaming))
        *_, last = manager.stream("A")
    assert (last.generated_ids, last.status, last.finish_reason) == ((5, 6, 7), FINISHED, FinishReason.STOP)
