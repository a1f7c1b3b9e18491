"""How the offline face pauses, stops and dies: nobody waits for ever, nothing ends twice. B08, latent problem 3."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from random import Random

import pytest

from engine.errors import LoopPaused, LoopStopped
from engine.forward_batch import ForwardBatch
from engine.generation_output import GenerationOutput
from engine.manager import ContinuousBatchingManager, StopMode
from tests.engine.managing import CANCELLED, DEADLINE_S, FAILED, FINISHED, Gate, asked, positions, result
from tests.engine.traces import Harness


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def harness(request: pytest.FixtureRequest) -> Harness:
    return Harness(emit=positions, asynchronous=request.param)


class Fault(BaseException):
    """No error of a request's or of the device: the engine cannot go on."""


def on_forward(number: int, error: BaseException) -> Callable[[ForwardBatch], None]:
    """Raises in that forward, from 1."""
    forwards = iter(range(1, 1 << 30))

    def run(_: ForwardBatch) -> None:
        if next(forwards) == number:
            raise error

    return run


def test_nothing_moves_inside_a_pause(harness: Harness) -> None:
    with ContinuousBatchingManager(harness.engine) as manager:
        with manager.pause(), manager.pause():
            manager.submit(asked("A"))
            assert manager.get_result("A", timeout_s=0.05) is None
            assert harness.engine.counters.batches == 0
        assert result(manager, "A").status is FINISHED


@pytest.mark.parametrize("mode", StopMode)
def test_stopping_inside_ones_own_pause_is_an_error(harness: Harness, mode: StopMode) -> None:
    with ContinuousBatchingManager(harness.engine) as manager:
        with manager.pause(), pytest.raises(LoopPaused):
            manager.stop(mode)
        manager.submit(asked("A"))
        assert result(manager, "A").status is FINISHED


def test_a_soft_stop_finishes_everything_and_accepts_nothing(harness: Harness) -> None:
    gate = Gate(harness)
    manager = ContinuousBatchingManager(harness.engine)
    manager.start()
    for name in "ABC":
        manager.submit(asked(name))
    gate.reached()
    with pytest.raises(TimeoutError, match="3 requests"):
        manager.stop(timeout_s=0)
    with pytest.raises(LoopStopped, match="no new requests"):
        manager.submit(asked("D"))
    gate.let(1000)
    manager.stop()
    manager.stop()
    assert not manager.alive and manager.error is None
    assert [output.status for output in manager.results()] == [FINISHED] * 3
    harness.assert_at_rest()


def test_a_stopped_manager_cannot_be_started_again_and_a_running_one_may_be(harness: Harness) -> None:
    manager = ContinuousBatchingManager(harness.engine)
    manager.start()
    with manager:
        manager.submit(asked("A"))
    for _ in range(2):
        with pytest.raises(LoopStopped, match="build a new one"):
            manager.start()
    assert result(manager, "A").status is FINISHED


def test_a_hard_stop_fails_what_runs_what_waits_and_what_never_came(harness: Harness) -> None:
    """Latent problem 4 once more: each keeps the tokens that it had."""
    gate = Gate(harness)
    manager = ContinuousBatchingManager(harness.engine)
    manager.start()
    manager.submit(asked("A", new=50))
    gate.let(2)
    for _ in range(3):
        gate.reached()
    manager.submit(asked("B"))
    with ThreadPoolExecutor() as threads:
        getter = threads.submit(manager.get_result, "B")
        stopper = threads.submit(manager.stop, StopMode.HARD)
        while not wait([stopper], timeout=0.02).done:
            gate.let(1)
        waited = getter.result(DEADLINE_S)
    first = result(manager, "A")
    assert waited is not None
    assert (first.status, first.generated_ids[:2]) == (FAILED, (4, 5))
    assert waited.status is FAILED
    assert first.error == waited.error == "the engine was stopped"
    assert list(manager.results()) == []
    assert not harness.engine.has_work
    harness.assert_at_rest()


@pytest.mark.parametrize("mode", StopMode)
def test_a_manager_that_never_started_fails_what_it_was_given(harness: Harness, mode: StopMode) -> None:
    manager = ContinuousBatchingManager(harness.engine)
    manager.submit(asked("A"))
    manager.stop(mode)
    assert result(manager, "A").status is FAILED


def test_an_exception_inside_the_with_stops_hard() -> None:
    manager = ContinuousBatchingManager(Harness(num_blocks=2500).engine)
    with pytest.raises(ZeroDivisionError), manager, manager.pause():
        manager.submit(asked("A", new=9000))
        raise ZeroDivisionError
    assert result(manager, "A").status is FAILED


def test_an_engine_that_was_stopped_hard_serves_the_next_manager(harness: Harness) -> None:
    for _ in range(3):
        first = ContinuousBatchingManager(harness.engine)
        first.submit(asked("A", new=100))
        first.start()
        first.stop(StopMode.HARD)
        with ContinuousBatchingManager(harness.engine) as second:
            second.submit(asked("A"))
            assert len(result(second, "A").generated_ids) == 5
    harness.assert_at_rest()


def test_b08_a_dead_engine_fails_the_living_wakes_the_waiting_and_refuses_the_new(harness: Harness) -> None:
    harness.runner.on_run = on_forward(3, Fault("no way on"))
    manager = ContinuousBatchingManager(harness.engine)
    with ThreadPoolExecutor() as threads:
        manager.submit(asked("A", streaming=True))
        manager.submit(asked("B"))
        with manager.pause():
            manager.start()
            streamer = threads.submit(lambda: list(manager.stream("A")))
            getter = threads.submit(manager.get_result, "B")
        *_, last = streamer.result(DEADLINE_S)
        other = getter.result(DEADLINE_S)
    assert other is not None
    for output in (last, other):
        assert output.status is FAILED
        assert output.generated_ids in {(4, 5), (4,)}  # asynchronously, the second was not taken in yet
        assert output.error is not None and "Fault: no way on" in output.error
    manager.stop()
    assert isinstance(manager.error, Fault) and not manager.alive
    with pytest.raises(LoopStopped, match="no way on"):
        manager.submit(asked("C"))
    manager.cancel("A")


def test_b08_a_soft_stop_does_not_wait_for_what_a_dead_engine_left(harness: Harness) -> None:
    gate = Gate(harness)
    manager = ContinuousBatchingManager(harness.engine)
    manager.start()
    manager.submit(asked("A"))
    gate.reached()
    harness.runner.on_run = on_forward(1, Fault())
    with ThreadPoolExecutor() as threads:
        stopper = threads.submit(manager.stop)
        gate.let(1)
        stopper.result(DEADLINE_S)
    assert result(manager, "A").status is FAILED


def test_b08_a_forward_that_fails_ends_those_in_it_and_the_engine_lives(harness: Harness) -> None:
    harness.runner.on_run = on_forward(3, RuntimeError("device lost a bit"))
    with ContinuousBatchingManager(harness.engine) as manager:
        manager.submit(asked("A"))
        failed = result(manager, "A")
        assert (failed.status, failed.generated_ids) == (FAILED, (4, 5))
        assert failed.error is not None and "device lost a bit" in failed.error
        manager.submit(asked("A"))
        assert result(manager, "A").status is FINISHED


def test_latent_3_a_request_that_outgrows_the_cache_fails_alone() -> None:
    harness = Harness(num_blocks=3, emit=positions)
    with ContinuousBatchingManager(harness.engine) as manager:
        manager.submit(asked("A", prompt=9, new=6))
        manager.submit(asked("B", prompt=2, new=2))
        big, small = result(manager, "A"), result(manager, "B")
    assert (big.status, big.generated_ids) == (FAILED, (9, 10, 11, 12))
    assert big.error is not None and "outgrew" in big.error
    assert small.status is FINISHED


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("end", ["soft", "hard", "death"])
def test_every_request_ends_exactly_once_whatever_happens(seed: int, end: str, asynchronous: bool) -> None:
    """Four threads submit, cancel and read; meanwhile the manager is paused, stopped, or dies."""
    harness = Harness(num_blocks=12, emit=positions, host_blocks=6, asynchronous=asynchronous, max_queue_size=3)
    if end == "death":
        harness.runner.on_run = on_forward(30, Fault())
    manager = ContinuousBatchingManager(harness.engine)
    ends: Counter[str] = Counter()
    lock = threading.Lock()

    def client(number: int) -> list[str]:
        random, accepted = Random(seed + number), list[str]()
        try:
            for i in range(25):
                wanted = asked(f"{number}-{i}", random.randint(1, 20), random.randint(0, 12), random.random() < 0.5)
                accepted.append(manager.submit(wanted, timeout_s=DEADLINE_S))
                if random.random() < 0.3:
                    manager.cancel(random.choice(accepted))
                if random.random() < 0.2:
                    with manager.pause():
                        pass
        except LoopStopped:
            assert end != "soft"
        return accepted

    def reader() -> None:
        for output in manager.results():
            check(output)

    def check(output: GenerationOutput) -> None:
        first = len(output.prompt_ids)
        assert output.generated_ids == tuple(range(first, first + len(output.generated_ids)))
        if output.is_terminal:
            assert output.status in ({FINISHED, CANCELLED} if end == "soft" else {FINISHED, CANCELLED, FAILED})
            with lock:
                ends[output.request_id] += 1

    with ThreadPoolExecutor() as threads:
        manager.start()
        clients = [threads.submit(client, number) for number in range(4)]
        threads.submit(reader).result(DEADLINE_S)
        if end == "hard":
            manager.stop(StopMode.HARD)
        accepted = [name for one in clients for name in one.result(DEADLINE_S)]
        manager.stop()
        reader()
    assert ends == dict.fromkeys(accepted, 1)
    if end != "death":
        harness.assert_at_rest()


def test_an_engine_left_with_work_by_a_dead_manager_is_not_taken_over() -> None:
    harness = Harness(emit=positions)
    first = ContinuousBatchingManager(harness.engine)
    first.submit(asked("A", new=50))

    def die(_: ForwardBatch) -> None:
        raise Fault("the device driver is gone")

    harness.runner.on_run = die
    first.start()
    assert result(first, "A").status is FAILED
    second = ContinuousBatchingManager(harness.engine)
    with pytest.raises(LoopStopped, match="build a new engine"):
        second.start()
