"""Processors before the choice: equal to transformers' own, in its order, on many rows as on one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.forward_batch import PLACEHOLDER, SampleKey
from engine.logits import plan_edits
from protocol.sampling import SamplingParams
from tests.engine.sampling_oracle import processed

VOCAB = 50
CPU = torch.device("cpu")
END_TOKENS = frozenset({3, 7})


def key(history: list[int], prompt_length: int, **params: Any) -> SampleKey:
    return SampleKey(SamplingParams(max_new_tokens=100, **params), 0, len(history), history, prompt_length)


@st.composite
def keys(draw: Callable[[st.SearchStrategy[Any]], Any]) -> SampleKey:
    tokens = st.integers(0, VOCAB - 1)
    history = draw(st.lists(tokens, min_size=1, max_size=40))
    bias = draw(st.dictionaries(tokens, st.floats(-100, 100, width=32).filter(bool), max_size=5))
    return key(
        history,
        draw(st.integers(1, len(history))),
        repetition_penalty=draw(st.sampled_from([1.0, 0.7, 1.3, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -2.0])),
        logit_bias=tuple(bias.items()),
        min_tokens=draw(st.integers(0, 40)),
        stop_token_ids=tuple(draw(st.lists(tokens, max_size=3))),
        ignore_eos=draw(st.booleans()),
    )


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def edited(logits: torch.Tensor, *rows: SampleKey) -> torch.Tensor:
    logits = logits.clone()
    edits = plan_edits(rows, END_TOKENS, logits.shape[-1], CPU)
    if edits:
        edits.apply(logits)
    return logits


@given(keys(), st.integers(0, 1000))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_a_row_is_processed_as_transformers_does(row: SampleKey, seed: int) -> None:
    logits = random_logits(1, seed)
    torch.testing.assert_close(edited(logits, row)[0], processed(logits[0], row, sorted(END_TOKENS)))


@given(st.lists(keys(), min_size=2, max_size=6))
@settings(deadline=None, max_examples=25, derandomize=True)
def test_many_rows_at_once_are_each_row_alone(rows: list[SampleKey]) -> None:
    logits = random_logits(len(rows))
    alone = [edited(logits[i : i + 1], row) for i, row in enumerate(rows)]
    assert torch.equal(edited(logits, *rows), torch.cat(alone))


def test_a_request_without_wishes_changes_no_logit() -> None:
    assert plan_edits([key([1, 2, 3], 2, temperature=0.7, top_k=3, top_p=0.5)] * 3, END_TOKENS, VOCAB, CPU) is None


def test_presence_counts_once_frequency_each_time_and_the_prompt_not_at_all() -> None:
    change = edited(torch.zeros(1, VOCAB), key([9, 9, 5, 5, 6], 2, presence_penalty=0.5, frequency_penalty=0.25))[0]
    assert {token: value for token, value in enumerate(change.tolist()) if value} == {5: -1.0, 6: -0.75}


def test_repetition_sees_the_prompt_too_and_pushes_both_signs_down() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    assert edited(logits, key([0, 1, 1], 2, repetition_penalty=2.0)).tolist() == [[1.0, -4.0, 2.0, -2.0]]


def test_the_bias_comes_before_the_repetition_penalty_and_that_before_the_others() -> None:
    params = {"logit_bias": ((0, 3.0),), "repetition_penalty": 2.0, "presence_penalty": 0.5}
    assert edited(torch.tensor([[1.0, 0.0]]), key([1, 0], 1, **params))[0, 0] == (1.0 + 3.0) / 2.0 - 0.5


def test_a_token_biased_twice_gets_both() -> None:
    assert edited(torch.zeros(1, VOCAB), key([1], 1, logit_bias=((4, 1.5), (4, 2.0))))[0, 4] == 3.5


def blocked(row: SampleKey) -> list[int]:
    return torch.isinf(edited(torch.zeros(1, VOCAB), row)[0]).nonzero().flatten().tolist()


def test_ends_are_out_until_the_output_is_long_enough() -> None:
    outputs = [key([1, *range(10, 10 + length)], 1, min_tokens=2, stop_token_ids=(20,)) for length in range(4)]
    assert [blocked(row) for row in outputs] == [[3, 7, 20], [3, 7, 20], [], []]


def test_who_ignores_end_tokens_may_choose_them_but_not_yet_a_stop_token() -> None:
    assert blocked(key([1], 1, min_tokens=2, stop_token_ids=(20,), ignore_eos=True)) == [20]
    assert blocked(key([1], 1, min_tokens=2, stop_token_ids=[20], ignore_eos=True)) == [20]


def test_a_bias_does_not_bring_back_what_the_minimum_forbids() -> None:
    assert blocked(key([1], 1, min_tokens=1, logit_bias=((3, 100.0),))) == [3, 7]


def test_tokens_that_the_head_cannot_produce_are_left_out() -> None:
    row = key([VOCAB, 60, 2], 1, repetition_penalty=2.0, logit_bias=((99, 5.0),), min_tokens=5, stop_token_ids=(70,))
    changed = (edited(torch.ones(1, VOCAB), row)[0] != 1.0).nonzero().flatten().tolist()
    assert changed == [2, 3, 7]


def test_a_history_that_is_needed_holds_no_placeholder() -> None:
    with pytest.raises(AssertionError, match="placeholder"):
        edited(torch.zeros(1, VOCAB), key([1, PLACEHOLDER], 1, repetition_penalty=2.0))


def test_a_plan_is_not_disturbed_by_a_history_that_goes_on() -> None:
    history = [1, 2]
    edits = plan_edits([key(history, 1, repetition_penalty=2.0)], END_TOKENS, VOCAB, CPU)
    history.append(5)
    logits = torch.ones(1, VOCAB)
    assert edits is not None
    edits.apply(logits)
    assert (logits[0] != 1.0).nonzero().flatten().tolist() == [1, 2]
