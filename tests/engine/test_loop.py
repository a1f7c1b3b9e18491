"""The engine's thread: calls between steps, outputs on it, and an end that everybody sees."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout

import pytest

from engine.engine import Engine
from engine.errors import DeviceLost, InvalidRequest, LoopPaused, LoopStopped, PoisonBroken
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


def test_an_idle_loop_ends_with_a_process_that_the_engine_runs_in(harness: Harness, collector: Collector) -> None:
    ended = threading.Event()
    loop = EngineLoop(harness.engine, collector, ended.set)
    loop.start()
    harness.runner.lose(DeviceLost("rank 1 was killed"))
    assert ended.wait(DEADLINE_S), "the loop goes on with half an engine"
    assert isinstance(loop.error, DeviceLost)
    loop.stop()


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


class Gate:
    """Holds the engine's thread inside a step until opened."""

    def __init__(self, harness: Harness) -> None:
        self.inside = threading.Event()
        self.open = threading.Event()
        harness.runner.on_run = self._wait

    def _wait(self, _: ForwardBatch) -> None:
        self.inside.set()
        assert self.open.wait(DEADLINE_S)


def in_thread(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_a_pause_waits_for_the_step_and_keeps_steps_and_calls_away(
    loop: EngineLoop, harness: Harness, collector: Collector
) -> None:
    gate = Gate(harness)
    loop.submit(lambda engine: engine.add(greedy_request("A", [1], 3)))
    assert gate.inside.wait(DEADLINE_S)
    with pytest.raises(TimeoutError, match="0 s"), loop.pause(timeout_s=0):
        raise AssertionError("the step has not ended")
    threading.Timer(0, gate.open.set).start()
    with loop.pause():
        batches = harness.engine.counters.batches
        late = loop.submit(lambda engine: engine.counters.batches)
        with pytest.raises(FutureTimeout):
            late.result(0.05)
        assert harness.engine.counters.batches == batches
    assert late.result(DEADLINE_S) == batches
    collector.wait_ended("A")


def test_the_last_of_several_holders_lets_the_loop_go_on(loop: EngineLoop) -> None:
    other_inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with loop.pause(), loop.pause():
            other_inside.set()
            assert leave.wait(DEADLINE_S)

    thread = in_thread(hold)
    with loop.pause():
        assert other_inside.wait(DEADLINE_S)
        call = loop.submit(lambda _: "ran")
    with pytest.raises(FutureTimeout):
        call.result(0.05)
    leave.set()
    assert call.result(DEADLINE_S) == "ran"
    thread.join(DEADLINE_S)


def test_stopping_inside_ones_own_pause_is_an_error_and_changes_nothing(loop: EngineLoop) -> None:
    with loop.pause(), pytest.raises(LoopPaused, match="leave it first"):
        loop.stop()
    assert loop.submit(lambda _: "ran").result(DEADLINE_S) == "ran"


def test_stopping_waits_for_the_pause_of_another(harness: Harness) -> None:
    loop = EngineLoop(harness.engine, on_step=lambda _: None)
    loop.start()
    with loop.pause():
        stopper = in_thread(loop.stop)
        assert loop.alive
    stopper.join(DEADLINE_S)
    assert not loop.alive


@pytest.mark.parametrize("ended", [False, True])
def test_a_loop_that_does_not_run_is_paused_at_once(harness: Harness, ended: bool) -> None:
    loop = EngineLoop(harness.engine, on_step=lambda _: None)
    if ended:
        loop.start()
        loop.stop()
    with loop.pause(timeout_s=0):
        assert not loop.alive


def test_a_loop_started_inside_a_pause_runs_after_it(harness: Harness) -> None:
    loop = EngineLoop(harness.engine, on_step=lambda _: None)
    call = loop.submit(lambda _: "ran")
    with loop.pause():
        loop.start()
        with pytest.raises(FutureTimeout):
            call.result(0.05)
    assert call.result(DEADLINE_S) == "ran"
    loop.stop()


@pytest.mark.parametrize("dies", [False, True])
def test_the_end_is_told_last_on_the_engines_thread(harness: Harness, dies: bool) -> None:
    ends: list[tuple[str, BaseException | None]] = []
    own = EngineLoop(
        harness.engine,
        on_step=lambda _: None,
        on_end=lambda: ends.append((threading.current_thread().name, own.error)),
    )
    own.start()
    if dies:
        own.post(lambda _: 1 // 0)
    own.stop()
    ((thread, error),) = ends
    assert thread == "engine"
    assert isinstance(error, ZeroDivisionError) if dies else error is None
