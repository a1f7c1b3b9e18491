"""The offline face: whoever asks gets outputs, each request ends exactly once. B03, B07, P38, P40, cancelling."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from engine.errors import InvalidRequest, QueueFull, UnknownRequest
from engine.generation_output import GenerationOutput, GenerationRequest
from engine.manager import ContinuousBatchingManager
from engine.request import RequestStatus
from protocol.messages import FinishReason
from protocol.sampling import SamplingParams
from tests.engine.managing import CANCELLED, DEADLINE_S, FAILED, FINISHED, Gate, asked, positions, result
from tests.engine.traces import Harness


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def harness(request: pytest.FixtureRequest) -> Harness:
    return Harness(emit=positions, asynchronous=request.param)


@pytest.fixture
def manager(harness: Harness) -> Iterator[ContinuousBatchingManager]:
    with ContinuousBatchingManager(harness.engine) as manager:
        yield manager
    assert not manager.alive
    harness.assert_at_rest()


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


def test_b03_each_consumer_gets_its_own_stream_whole_and_in_order(manager: ContinuousBatchingManager) -> None:
    def by_asking(name: str) -> list[GenerationOutput]:
        outputs = [result(manager, name)]
        while not outputs[-1].is_terminal:
            outputs.append(result(manager, name))
        return outputs

    with ThreadPoolExecutor() as threads:
        with manager.pause():
            for name in "AB":
                manager.submit(asked(name, streaming=True))
            consumers = [threads.submit(by_asking, "A"), threads.submit(lambda: list(manager.stream("B")))]
        for consumer in consumers:
            assert [len(output.generated_ids) for output in consumer.result(DEADLINE_S)] == [1, 2, 3, 4, 5]


def test_results_wait_for_whoever_asks_in_any_order(manager: ContinuousBatchingManager) -> None:
    names = [manager.submit(asked(None, new=new)) for new in (1, 2, 3)]
    assert len(set(names)) == 3
    assert [len(result(manager, name).generated_ids) for name in reversed(names)] == [3, 2, 1]


def test_nothing_in_time_is_none_and_an_unknown_id_an_error(manager: ContinuousBatchingManager) -> None:
    with manager.pause():
        manager.submit(asked("A"))
        assert manager.get_result("A", timeout_s=0) is None
        assert manager.get_result(timeout_s=0) is None
    result(manager, "A")
    for call in (manager.get_result, manager.stream):
        with pytest.raises(UnknownRequest, match="nobody"):
            call("nobody")


def test_results_of_all_end_with_the_last_one(manager: ContinuousBatchingManager) -> None:
    assert list(manager.results()) == []
    for name in "ABC":
        manager.submit(asked(name, new=3, streaming=name == "B"))
    outputs = list(manager.results())
    assert sorted(output.request_id for output in outputs) == ["A", "B", "B", "B", "C"]
    assert manager.get_result() is None


def test_a_consumer_whose_last_output_is_taken_by_another_is_told(manager: ContinuousBatchingManager) -> None:
    with ThreadPoolExecutor() as threads:
        with manager.pause():
            manager.submit(asked("A"))
            takers = [threads.submit(manager.get_result, "A") for _ in range(2)]
        failures = [taker.exception(DEADLINE_S) for taker in takers]
    assert [type(failure) for failure in failures if failure is not None] == [UnknownRequest]


# ---- submission ----


def test_b07_a_manager_that_idles_takes_what_comes_later(manager: ContinuousBatchingManager) -> None:
    with manager.pause():
        pass  # it has come to rest with nothing to do
    manager.submit(asked("A"))
    assert len(result(manager, "A").generated_ids) == 5


def test_b07_nothing_to_do_at_all(harness: Harness) -> None:
    with ContinuousBatchingManager(harness.engine):
        pass


def test_what_is_submitted_before_the_start_runs_after_it(harness: Harness) -> None:
    manager = ContinuousBatchingManager(harness.engine)
    manager.submit(asked("A"))
    with manager:
        assert result(manager, "A").status is FINISHED


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
    outputs = {output.request_id: output.generated_ids for output in manager.results()}
    assert outputs == dict.fromkeys(["A__child#1", "A__child#2", "A"], (9, 10, 11))


# ---- callbacks ----


def test_callbacks_run_on_their_asyncio_loop_in_order(manager: ContinuousBatchingManager) -> None:
    async def main() -> list[GenerationOutput]:
        outputs: list[GenerationOutput] = []
        done = asyncio.Event()

        def on_output(output: GenerationOutput) -> None:
            assert threading.current_thread() is threading.main_thread()
            outputs.append(output)
            if output.is_terminal:
                done.set()

        manager.submit(asked("A", new=3, streaming=True), on_output)
        await asyncio.wait_for(done.wait(), DEADLINE_S)
        return outputs

    assert [len(output.generated_ids) for output in asyncio.run(main())] == [1, 2, 3]
    with pytest.raises(UnknownRequest):
        manager.get_result("A")


def test_a_closed_asyncio_loop_harms_nobody(
    manager: ContinuousBatchingManager, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        manager.submit(asked("A"), on_output=lambda _: None)

    with caplog.at_level(logging.WARNING), manager.pause():
        asyncio.run(main())
    manager.submit(asked("B"))
    assert result(manager, "B").status is FINISHED
    assert "asyncio loop is closed" in caplog.text


# ---- cancelling ----


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
