"""Forwards on a thread of their own, each fed with tokens of the one before it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.model_runner import ModelRunner
from engine.runner import Runner, SampledToken
from engine.threaded_runner import ThreadedRunner
from protocol.sampling import SamplingParams
from tests.engine.runners import DEADLINE_S, GREEDY, Bench, batch, texts
from tests.engine.tiny_models import greedy, prompt_of

NEW = 8


@pytest.fixture
def bench(tiny_llama: Path) -> Bench:
    return Bench(tiny_llama)


@pytest.fixture
def threaded(bench: Bench) -> Iterator[ThreadedRunner]:
    with ThreadedRunner(ModelRunner(bench.model, bench.backend)) as runner:
        yield runner


def overlapped(
    bench: Bench, runner: Runner, prompts: list[list[int]], params: SamplingParams = GREEDY
) -> list[list[int]]:
    """Each forward is launched before the tokens of the one before it are looked at."""
    sequences = [bench.sequence(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
    pending = runner.launch(batch(*(s.row() for s in sequences)))
    for step in range(NEW):
        following = (
            runner.launch(batch(*(s.carried_row(i) for i, s in enumerate(sequences)))) if step < NEW - 1 else None
        )
        for sequence, token in zip(sequences, pending.result().tokens, strict=True):
            sequence.take(token)
        if following:
            pending = following
    return [s.generated for s in sequences]


def test_carried_tokens_give_the_oracles_answers(bench: Bench, threaded: ThreadedRunner, tiny_llama: Path) -> None:
    prompts = [prompt_of(5), prompt_of(13), prompt_of(1)]
    assert overlapped(bench, threaded, prompts) == [greedy(tiny_llama, prompt, NEW) for prompt in prompts]
    assert bench.backend.plans == NEW


def test_the_synchronous_runner_takes_carried_tokens_too(bench: Bench, tiny_llama: Path) -> None:
    prompts = [prompt_of(5), prompt_of(13)]
    runner = ModelRunner(bench.model, bench.backend)
    assert overlapped(bench, runner, prompts) == [greedy(tiny_llama, prompt, NEW) for prompt in prompts]


def test_a_carried_token_counts_in_the_history_that_penalties_look_at(bench: Bench, threaded: ThreadedRunner) -> None:
    params = SamplingParams(max_new_tokens=NEW, temperature=0.7, repetition_penalty=1.8, frequency_penalty=1.5)
    prompts = [prompt_of(5), prompt_of(9)]
    sequences = [bench.sequence(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
    waiting = ModelRunner(bench.model, bench.backend)
    for _ in range(NEW):
        tokens = waiting.launch(batch(*(s.row() for s in sequences))).result().tokens
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.take(token)
    assert overlapped(bench, threaded, prompts, params) == [s.generated for s in sequences]


def test_rows_may_change_places_and_newcomers_join_between_two_forwards(
    bench: Bench, threaded: ThreadedRunner, tiny_llama: Path
) -> None:
    a, b, late = (bench.sequence(name, prompt_of(n)) for name, n in (("a", 6), ("b", 9), ("late", 11)))
    first = threaded.launch(batch(a.row(), b.row()))
    second = threaded.launch(batch(late.row(7), b.carried_row(1), a.carried_row(0)))
    for sequence, token in zip((a, b), first.result().tokens, strict=True):
        sequence.take(token)
    third = threaded.launch(batch(a.carried_row(1), late.row(), b.carried_row(0)))
    for sequence, token in zip((b, a), second.result().tokens, strict=True):
        sequence.take(token)
    for sequence, token in zip((a, late, b), third.result().tokens, strict=True):
        sequence.take(token)
    for sequence in (a, b, late):
        prompt = sequence.tokens[: sequence.prompt_length]
        assert sequence.generated == greedy(tiny_llama, prompt, len(sequence.generated))


def test_a_batchs_lists_may_change_once_it_is_launched(
    bench: Bench, threaded: ThreadedRunner, tiny_llama: Path
) -> None:
    sequence = bench.sequence("a", prompt_of(10))
    tables = [list(table) for table in sequence.tables]
    bench.backend.gate.clear()
    pending = threaded.launch(batch(sequence.row()))
    assert not pending.done(), "launch does not wait for the forward"
    for table in sequence.tables:
        table.clear()
    sequence.tokens.clear()
    bench.backend.gate.set()
    token = pending.result(DEADLINE_S).tokens[0]
    assert token == SampledToken(greedy(tiny_llama, prompt_of(10), 1)[0])
    assert not bench.pool.pages(0)[tables[0][:2]].isnan().any(), "its KV went where the table had said"


def test_a_failed_forward_voids_what_follows_from_it_and_nothing_else(
    bench: Bench, threaded: ThreadedRunner, tiny_llama: Path
) -> None:
    a, b = bench.sequence("a", prompt_of(6)), bench.sequence("b", prompt_of(9))
    bench.backend.gate.clear()
    bench.backend.fail_next = True
    first = threaded.launch(batch(a.row()))
    second = threaded.launch(batch(a.carried_row(0), b.row()))
    bench.backend.gate.set()
    with pytest.raises(RuntimeError, match="fell over"):
        first.result(DEADLINE_S)
    void, token = second.result(DEADLINE_S).tokens
    assert isinstance(void, str)
    assert "its forward failed" in void
    assert token == SampledToken(greedy(tiny_llama, prompt_of(9), 1)[0])


def test_a_broken_request_voids_its_own_next_token_alone(
    bench: Bench, threaded: ThreadedRunner, tiny_llama: Path
) -> None:
    """The broken one reads a page that nobody has written: NaN."""
    broken, fine = bench.sequence("broken", prompt_of(8)), bench.sequence("fine", prompt_of(7))
    broken.past = 4
    first = threaded.launch(batch(broken.row(), fine.row()))
    second = threaded.launch(batch(fine.carried_row(1), broken.carried_row(0)))
    assert len(texts(first.result(DEADLINE_S))) == 1
    token, void = second.result(DEADLINE_S).tokens
    assert token == SampledToken(greedy(tiny_llama, prompt_of(7), 2)[1])
    assert isinstance(void, str)
    assert "the token before it is missing" in void


def test_what_goes_wrong_while_a_batch_is_prepared_is_the_results_to_raise(
    bench: Bench, threaded: ThreadedRunner, tiny_llama: Path
) -> None:
    a, b = bench.sequence("a", prompt_of(6)), bench.sequence("b", prompt_of(9))
    first = threaded.launch(batch(replace(a.row(), tables=[[]])))
    second = threaded.launch(batch(a.carried_row(0), b.row()))
    with pytest.raises(IndexError):
        first.result(DEADLINE_S)
    assert len(texts(second.result(DEADLINE_S))) == 1


def test_a_third_forward_may_not_be_launched_while_two_are_under_way(bench: Bench, threaded: ThreadedRunner) -> None:
    sequence = bench.sequence("a", prompt_of(6))
    bench.backend.gate.clear()
    pending = [threaded.launch(batch(sequence.row(2))) for _ in range(2)]
    with pytest.raises(AssertionError, match="third"):
        threaded.launch(batch(sequence.row(2)))
    bench.backend.gate.set()
    assert [forward.result(DEADLINE_S).tokens for forward in pending] == [[], []]


def test_one_that_never_ran_closes(bench: Bench) -> None:
    ThreadedRunner(ModelRunner(bench.model, bench.backend)).close()


def test_closing_waits_for_what_is_under_way(bench: Bench) -> None:
    runner = ThreadedRunner(ModelRunner(bench.model, bench.backend))
    pending = runner.launch(batch(bench.sequence("a", prompt_of(6)).row()))
    runner.close()
    runner.close()
    assert pending.done()
    assert bench.progress.value == bench.geometry.layers
