"""The engine's thread: calls between steps, outputs on it, and an end that everybody sees."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from engine.engine import Engine
from engine.errors import InvalidRequest, LoopStopped, PoisonBroken
from engine.forward_batch import ForwardBatch
from engine.loop import EngineLoop
from engine.outputs import StepOutput
from tests.engine.driving import Gathered, greedy_request
from tests.engine.traces import Harness

DEADLINE_S = 20.0


class Collector:
    """Outputs as they come, and a way to wait for an end."""

    def __init__(self) -> None:
        self.gathered = Gathered()
        self.threads: set[str] = set()
        self._changed = threading.Condition()

    def __call__(self, output: StepOutput) -> None:
        with self._changed:
            self.threads.add(threading.current_thread().name)
            self.gathered.take(output)
            self._changed.notify_all()

    def wait_ended(self, request_id: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: request_id in self.gathered.ended, DEADLINE_S)


@pytest.fixture
def harness() -> Harness:
    return Harness()


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
def loop(harness: Harness, collector: Collector) -> Iterator[EngineLoop]:
    loop = EngineLoop(harness.engine, collector)
    loop.start()
    yield loop
    loop.stop()
    assert not loop.alive


def test_submitted_work_runs_on_the_engines_thread(loop: EngineLoop, collector: Collector) -> None:
    def add(engine: Engine) -> str:
        engine.add(greedy_request("A", [1, 2, 3], 5))
        return threading.current_thread().name

    assert loop.submit(add).result(DEADLINE_S) == "engine"
    collector.wait_ended("A")
    assert collector.gathered.tokens["A"] == [1] * 5
    assert collector.threads == {"engine"}


def test_calls_run_in_order(loop: EngineLoop) -> None:
    seen: list[int] = []
    futures = [loop.submit(lambda _, i=i: seen.append(i)) for i in range(50)]  # type: ignore[misc]
    for future in futures:
        future.result(DEADLINE_S)
    assert seen == list(range(50))


def test_a_refusal_belongs_to_its_caller_and_the_loop_goes_on(loop: EngineLoop, collector: Collector) -> None:
    with pytest.raises(InvalidRequest):
        loop.submit(lambda engine: engine.add(greedy_request("A", [], 1))).result(DEADLINE_S)
    with pytest.raises(ZeroDivisionError):
        loop.submit(lambda _: 1 // 0).result(DEADLINE_S)
    loop.submit(lambda engine: engine.add(greedy_request("B", [1], 1)))
    collector.wait_ended("B")


def test_an_idle_loop_takes_no_steps(loop: EngineLoop, harness: Harness) -> None:
    """A request that waits for KV leaves the loop asleep: no step runs until something changes."""
    loop.submit(lambda engine: engine.reserve(harness.make("A", 8, 1))).result(DEADLINE_S)
    assert not loop.submit(lambda engine: engine.has_work).result(DEADLINE_S)
    assert harness.engine.counters.batches == 0


def test_calls_may_be_submitted_from_the_engines_thread(harness: Harness) -> None:
    done = threading.Event()

    def on_step(_: StepOutput) -> None:
        own.submit(lambda _: done.set())

    own = EngineLoop(harness.engine, on_step)
    own.start()
    own.submit(lambda engine: engine.add(greedy_request("A", [1], 1)))
    assert done.wait(DEADLINE_S)
    own.stop()


def test_stopping_runs_what_was_submitted_and_refuses_the_rest(harness: Harness, collector: Collector) -> None:
    loop = EngineLoop(harness.engine, collector)
    first = loop.submit(lambda engine: engine.pages_total)
    loop.start()
    loop.stop()
    loop.stop()
    assert first.result(DEADLINE_S) == 64
    assert loop.error is None
    with pytest.raises(LoopStopped, match="stopped"):
        loop.submit(lambda _: None)


def test_a_loop_that_never_started_can_be_stopped(harness: Harness, collector: Collector) -> None:
    loop = EngineLoop(harness.engine, collector)
    loop.stop()
    assert not loop.alive


def test_a_dead_loop_is_visible_and_refuses_work(harness: Harness) -> None:
    running = threading.Event()
    go = threading.Event()

    def on_step(_: StepOutput) -> None:
        running.set()
        assert go.wait(DEADLINE_S)
        raise RuntimeError("no way on")

    loop = EngineLoop(harness.engine, on_step)
    loop.start()
    loop.submit(lambda engine: engine.add(greedy_request("A", [1], 1)))
    assert running.wait(DEADLINE_S)
    late = loop.submit(lambda _: None)
    go.set()
    with pytest.raises(CancelledError):
        late.result(DEADLINE_S)
    loop.stop()
    assert not loop.alive
    assert isinstance(loop.error, RuntimeError)
    with pytest.raises(LoopStopped, match="no way on"):
        loop.submit(lambda _: None)


def test_a_forward_that_fails_does_not_end_the_loop(loop: EngineLoop, harness: Harness, collector: Collector) -> None:
    def fail(_: ForwardBatch) -> None:
        harness.runner.on_run = lambda _: None
        raise RuntimeError("boom")

    harness.runner.on_run = fail
    loop.submit(lambda engine: engine.add(greedy_request("A", [1], 1)))
    collector.wait_ended("A")
    loop.submit(lambda engine: engine.add(greedy_request("B", [1], 1)))
    collector.wait_ended("B")
    assert loop.alive


def test_a_posted_call_that_raises_ends_the_loop_with_its_error(harness: Harness) -> None:
    """Nobody waits for it, so nobody else would ever hear of it: not even an error of the engine's own is kept."""
    loop = EngineLoop(harness.engine, on_step=lambda _: None)
    loop.start()

    def fail(_: object) -> None:
        raise PoisonBroken("written to while free")

    loop.post(fail)
    loop.stop()
    assert not loop.alive and isinstance(loop.error, PoisonBroken)
