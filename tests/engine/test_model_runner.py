"""One forward at a time: what a launch has done when it returns, and what its result says."""

import time
from pathlib import Path

import pytest

from engine.model_runner import ModelRunner
from engine.models.binding import BoundModel
from engine.models.loading import load_model
from engine.runner import SampledToken
from tests.engine.runners import Bench, batch, texts
from tests.engine.tiny_models import greedy, prompt_of


@pytest.fixture
def bench(tiny_llama: Path) -> Bench:
    return Bench(tiny_llama)


@pytest.fixture
def runner(bench: Bench) -> ModelRunner:
    return ModelRunner(bench.model, bench.backend)


def test_a_forward_has_run_when_launch_returns(bench: Bench, runner: ModelRunner) -> None:
    before = time.monotonic_ns()
    pending = runner.launch(batch(bench.sequence("a", prompt_of(6)).row()))
    assert bench.progress.value == bench.geometry.layers
    result = pending.result()
    assert before <= result.started_ns <= result.ended_ns <= time.monotonic_ns()


def test_only_rows_that_want_a_token_get_one_in_their_order(
    bench: Bench, runner: ModelRunner, tiny_llama: Path
) -> None:
    slice_, whole, other = (bench.sequence(f"r{n}", prompt_of(n)) for n in (14, 9, 5))
    tokens = runner.launch(batch(whole.row(), slice_.row(6), other.row())).result().tokens
    assert tokens == [SampledToken(greedy(tiny_llama, prompt_of(n), 1)[0]) for n in (9, 5)]
    assert runner.launch(batch(slice_.row(4))).result().tokens == []
    assert runner.launch(batch(slice_.row())).result().tokens == [SampledToken(greedy(tiny_llama, prompt_of(14), 1)[0])]


def test_logits_that_are_not_finite_are_an_error_of_their_row_alone(
    bench: Bench, runner: ModelRunner, tiny_llama: Path
) -> None:
    broken, fine = bench.sequence("broken", prompt_of(8)), bench.sequence("fine", prompt_of(7))
    broken.past = 4
    result = runner.launch(batch(broken.row(), fine.row())).result()
    assert [type(token) for token in result.tokens] == [str, SampledToken]
    assert "finite" in texts(result)[0]


def test_a_failure_is_raised_by_the_result_and_the_next_forward_runs(
    bench: Bench, runner: ModelRunner, tiny_llama: Path
) -> None:
    bench.backend.fail_next = True
    pending = runner.launch(batch(bench.sequence("a", prompt_of(6)).row()))
    with pytest.raises(RuntimeError, match="fell over"):
        pending.result()
    tokens = runner.launch(batch(bench.sequence("b", prompt_of(7)).row())).result().tokens
    assert tokens == [SampledToken(greedy(tiny_llama, prompt_of(7), 1)[0])]


def test_a_model_without_a_head_runs_batches_that_want_nothing(tiny_llama: Path, bench: Bench) -> None:
    base = load_model(tiny_llama, head=False).model
    runner = ModelRunner(BoundModel(base, bench.backend, bench.progress), bench.backend)
    sequence = bench.sequence("a", prompt_of(9))
    assert runner.launch(batch(sequence.row(8))).result().tokens == []
    assert bench.progress.value == bench.geometry.layers
