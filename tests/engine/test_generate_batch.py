"""`generate_batch` beside transformers' `generate`: B04, order, forks, refusals, interruption."""

import itertools
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.build import assemble
from engine.config import ContinuousBatchingConfig
from engine.errors import InvalidRequest, LoopStopped
from engine.forward_batch import ForwardBatch
from engine.manager import ContinuousBatchingManager
from engine.models.loading import LoadedModel, load_model
from protocol.sampling import SamplingParams
from tests.engine.driving import assert_at_rest
from tests.engine.managing import DEADLINE_S, FAILED, FINISHED, asked, positions
from tests.engine.tiny_models import greedy, prompt_of
from tests.engine.traces import Harness

CONFIG = ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=64, debug_pages=True)


@pytest.fixture
def harness() -> Harness:
    return Harness(emit=positions)


@pytest.fixture
def manager(harness: Harness) -> Iterator[ContinuousBatchingManager]:
    with ContinuousBatchingManager(harness.engine) as manager:
        yield manager
    harness.assert_at_rest()


def limit(new: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=new)


def test_b04_batches_follow_each_other_and_the_model_is_as_before(tiny_llama: Path, seed: int) -> None:
    """Twice on one manager and once more on the next; then the same weights run under transformers' own `generate`."""
    loaded = load_model(tiny_llama)
    engine = assemble(loaded, CONFIG)
    prompts = [prompt_of(length, seed) for length in (5, 40, 17)]
    expected = [greedy(tiny_llama, prompt, 8) for prompt in prompts]
    with ContinuousBatchingManager(engine) as first:
        batches = [first.generate_batch(prompts, limit(8)) for _ in range(2)]
    with ContinuousBatchingManager(engine) as second:
        batches.append(second.generate_batch(prompts, limit(8)))
    for batch in batches:
        assert [list(output.generated_ids) for output in batch.values()] == expected
        assert [list(output.prompt_ids) for output in batch.values()] == prompts
    assert not batches[0].keys() & batches[1].keys()
    assert_at_rest(engine)
    engine.close()
    assert [generate(loaded, prompt, 8) for prompt in prompts] == expected


def generate(loaded: LoadedModel, prompt: list[int], count: int) -> list[int]:
    model: Any = loaded.model
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return list(map(int, out[0, len(prompt) :]))


def test_seeded_sampling_does_not_depend_on_company(tiny_llama: Path, seed: int) -> None:
    engine = assemble(load_model(tiny_llama), CONFIG)
    prompts = [prompt_of(length, seed) for length in (5, 40, 17)]
    sampling = SamplingParams(max_new_tokens=8, temperature=0.9, top_p=0.8, seed=seed, logprobs=True)
    with ContinuousBatchingManager(engine) as manager:
        together = manager.generate_batch(prompts, sampling)
        alone = [output for prompt in prompts for output in manager.generate_batch([prompt], sampling).values()]
    for one, other in zip(together.values(), alone, strict=True):
        assert one.generated_ids == other.generated_ids
        assert one.logprobs is not None and len(one.logprobs) == 8
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_further_sequences_come_before_their_prompts_own(manager: ContinuousBatchingManager) -> None:
    batch = manager.generate_batch([[9], [3, 4, 5, 6, 7]], limit(2), n=3)
    names = [f"{parent}{suffix}" for parent in ("req_0", "req_1") for suffix in ("__child#1", "__child#2", "")]
    assert list(batch) == names
    assert [output.generated_ids for output in batch.values()] == [(1, 2)] * 3 + [(5, 6)] * 3


@pytest.mark.parametrize(("sharing", "order"), [(True, [2, 0, 3, 1]), (False, [0, 1, 2, 3])])
def test_prompts_that_begin_alike_are_queued_together_where_blocks_are_shared(sharing: bool, order: list[int]) -> None:
    harness = Harness(emit=positions, sharing=sharing)
    prompts = [[5, 5, 5], [1, 2], [5, 5, 6], [1, 2, 3]]
    manager = ContinuousBatchingManager(harness.engine)
    with ThreadPoolExecutor() as threads:
        with manager.pause():
            manager.start()
            batch = threads.submit(manager.generate_batch, prompts, limit(1))
        outputs = batch.result(DEADLINE_S)
    manager.stop()
    assert [list(output.prompt_ids) for output in outputs.values()] == prompts
    ran = [row.request_id for forward in harness.runner.batches for row in forward.rows]
    assert ran == [f"req_{index}" for index in order]


def test_a_prompt_that_is_refused_costs_the_others_nothing(manager: ContinuousBatchingManager) -> None:
    batch = manager.generate_batch([[1, 2], [], [-1], [1] * 300, [3]], limit(2))
    assert [output.status for output in batch.values()] == [FINISHED, FAILED, FAILED, FAILED, FINISHED]
    errors = [output.error or "" for output in batch.values()]
    assert all(word in error for word, error in zip(["", "empty", "-1", "never fit", ""], errors, strict=True))


def test_a_batch_of_nothing_is_nothing(manager: ContinuousBatchingManager) -> None:
    assert manager.generate_batch([], limit(2)) == {}


def test_impossible_sampling_is_refused_before_anything_runs(manager: ContinuousBatchingManager) -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        manager.generate_batch([[1]], SamplingParams(max_new_tokens=1, temperature=-1.0))


def test_a_batch_on_a_stopped_manager_is_refused(harness: Harness) -> None:
    with ContinuousBatchingManager(harness.engine) as manager:
        pass
    with pytest.raises(LoopStopped):
        manager.generate_batch([[1]], limit(1))


def test_a_batch_larger_than_the_queue_waits_its_turn() -> None:
    with ContinuousBatchingManager(Harness(emit=positions, max_queue_size=2).engine) as manager:
        assert len(manager.generate_batch([[1]] * 50, limit(1))) == 50


def test_results_of_a_batch_are_not_taken_by_others(manager: ContinuousBatchingManager) -> None:
    with manager.pause():
        manager.submit(asked("A"))
    assert len(manager.generate_batch([[1], [2]], limit(3))) == 2
    assert [output.request_id for output in manager.results()] == ["A"]


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """Also in the background of a script, whose shell has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_an_interrupted_batch_cancels_what_it_submitted() -> None:
    """By Ctrl-C, while it waits."""
    harness = Harness(emit=positions, num_blocks=5000)
    forwards, cancelled = itertools.count(), threading.Event()

    def interrupt_once(_: ForwardBatch) -> None:
        if next(forwards) == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert cancelled.wait(DEADLINE_S)

    harness.runner.on_run = interrupt_once
    with ContinuousBatchingManager(harness.engine) as manager:
        with pytest.raises(KeyboardInterrupt):
            manager.generate_batch([[1], [2]], limit(9000))
        cancelled.set()
        assert len(manager.generate_batch([[1]], limit(1))) == 1
    assert harness.engine.counters.tokens <= 2 * 4 + 1
    harness.assert_at_rest()


def test_a_prompt_that_is_no_list_of_tokens_costs_the_others_nothing() -> None:
    harness, wrong = Harness(emit=positions, sharing=True), cast(list[int], ["a"])
    with ContinuousBatchingManager(harness.engine) as manager:
        outputs = list(manager.generate_batch([[1, 2], wrong, [3]], limit(1)).values())
    assert [output.status for output in outputs] == [FINISHED, FAILED, FINISHED]
    assert "'a'" in (outputs[1].error or "")
