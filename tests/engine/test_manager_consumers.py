"""Whoever asks gets outputs: queues of several consumers, waiting, callbacks. B03, B07."""

import asyncio
import logging
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.errors import UnknownRequest
from engine.generation_output import GenerationOutput
from engine.manager import ContinuousBatchingManager
from tests.engine.managing import DEADLINE_S, FINISHED, asked, positions, result
from tests.engine.traces import Harness


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


def test_b07_a_manager_that_idles_takes_what_comes_later(manager: ContinuousBatchingManager) -> None:
    with manager.pause():
        pass  # it has come to rest with nothing to do
    manager.submit(asked("A"))
    assert len(result(manager, "A").generated_ids) == 5


def test_b07_nothing_to_do_at_all(harness: Harness) -> None:
    with ContinuousBatchingManager(harness.engine):
        pass


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


def test_a_stream_that_nobody_reads_costs_no_more_for_being_long() -> None:
    """Each output holds all tokens so far, but only once it is taken."""
    harness = Harness(emit=positions, num_blocks=1000)
    with ContinuousBatchingManager(harness.engine) as manager:
        tracemalloc.start()
        manager.submit(asked("A", new=2000, streaming=True))
        manager.stop()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        outputs = list(manager.stream("A"))
    assert [len(output.generated_ids) for output in outputs] == list(range(1, 2001))
    assert most < 2000 * 2000 * 8 / 4, "a quarter of what the tokens of all outputs would take as they are"
