"""Choosing tokens: each by its own row, parameters, seed, position and history, whatever else is in the batch."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.forward_batch import SampleKey
from engine.runner import SampledToken
from engine.sampler import (
    NOT_FINITE,
    NOTHING_LEFT,
    one_by_one,
    plan_groups,
    plan_samples,
    read_report,
    sample_tokens,
    together,
)
from protocol.sampling import SamplingParams
from tests.engine.sampling_oracle import probabilities, processed

VOCAB = 40
END_TOKENS = frozenset({0})
HISTORY = [11, 4, 4, 30, 2, 11]
LOGITS = 2 * torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3))


def key(seed: int = 0, position: int = len(HISTORY), prompt_length: int = 3, **params: Any) -> SampleKey:
    history = (HISTORY * (1 + position // len(HISTORY)))[:position]
    return SampleKey(SamplingParams(max_new_tokens=100, **params), seed, position, history, prompt_length)


def sampled(seed: int = 0, position: int = len(HISTORY), **params: Any) -> SampleKey:
    return key(seed, position, **{"temperature": 1.0, **params})


def tokens(logits: torch.Tensor, keys: list[SampleKey]) -> list[int | str]:
    chosen = sample_tokens(logits, keys, END_TOKENS)
    return [one if isinstance(one, str) else one.token for one in chosen]


VARIETY = [
    key(),
    sampled(1),
    sampled(2, temperature=0.6, top_k=5),
    key(repetition_penalty=1.5, logprobs=True),
    sampled(3, top_p=0.8, frequency_penalty=0.5, logprobs=True),
    key(min_tokens=50, stop_token_ids=(7,), logit_bias=((7, 30.0), (9, 3.0))),
    sampled(4, min_p=0.1, presence_penalty=-1.0),
    key(logprobs=True),
]


def test_temperature_zero_takes_the_best() -> None:
    assert tokens(LOGITS, [key(top_k=3, top_p=0.1, min_p=0.9)] * 8) == LOGITS.argmax(dim=-1).tolist()


def test_a_token_depends_on_its_own_row_only() -> None:
    together = sample_tokens(LOGITS, VARIETY, END_TOKENS)
    alone = [sample_tokens(LOGITS[i : i + 1], [one], END_TOKENS)[0] for i, one in enumerate(VARIETY)]
    assert together == alone
    assert sample_tokens(LOGITS.flip(0), VARIETY[::-1], END_TOKENS) == together[::-1]


def test_rows_worked_on_together_choose_what_each_chooses_alone() -> None:
    logits, keys = LOGITS.repeat(3, 1), VARIETY * 3
    logits[20, 3] = float("nan")
    at_once = plan_groups(together(keys), keys, END_TOKENS, VOCAB, logits.device).choose(logits)
    alone = plan_groups(one_by_one(keys), keys, END_TOKENS, VOCAB, logits.device).choose(logits)
    assert len(together(keys)) == 2
    assert at_once.tokens.tolist() == alone.tokens.tolist()
    torch.testing.assert_close(at_once.report, alone.report, equal_nan=True)


def test_seed_and_position_change_what_is_drawn() -> None:
    flat = torch.zeros(1, VOCAB)
    seeds = {tokens(flat, [sampled(seed)])[0] for seed in range(20)}
    positions = {tokens(flat, [sampled(position=position)])[0] for position in range(20)}
    assert len(seeds) > 10 and len(positions) > 10


@given(
    st.builds(
        sampled,
        seed=st.integers(0, 1 << 40),
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        top_k=st.sampled_from([0, 3, 10**15]),
        top_p=st.sampled_from([1.0, 0.6]),
        min_p=st.sampled_from([0.0, 0.2]),
        repetition_penalty=st.sampled_from([1.0, 1.4]),
        presence_penalty=st.sampled_from([0.0, 1.1]),
        logit_bias=st.sampled_from([(), ((4, -2.0), (17, 1.5))]),
        min_tokens=st.sampled_from([0, 9]),
        logprobs=st.just(True),
    ),
    st.integers(0, 1000),
)
@settings(deadline=None, max_examples=80, derandomize=True)
def test_a_log_probability_is_that_of_the_processed_logits(one: SampleKey, seed: int) -> None:
    logits = 2 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    chosen = sample_tokens(logits, [one], END_TOKENS)[0]
    row = processed(logits[0], one, sorted(END_TOKENS))
    shares = probabilities(row, one.params) if one.params.temperature else torch.softmax(row.double(), dim=-1)
    assert isinstance(chosen, SampledToken) and chosen.logprob is not None
    assert math.isclose(chosen.logprob, float(shares[chosen.token].log()), rel_tol=1e-5, abs_tol=1e-6)
    if not one.params.temperature:
        assert chosen.token == int(row.argmax())


@pytest.mark.parametrize(
    "wish",
    [
        {"logit_bias": ((9, 8.0),)},
        {"repetition_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"min_tokens": 50},
    ],
    ids=lambda wish: next(iter(wish)),
)
def test_each_wish_alone_changes_a_greedy_choice(wish: dict[str, Any]) -> None:
    logits = torch.ones(1, VOCAB)
    logits[0, 0 if "min_tokens" in wish else 30] = 1.5
    best = int(logits.argmax())
    assert tokens(logits, [key()]) == [best]
    assert tokens(logits, [key(**wish)]) != [best]


def test_log_probabilities_come_only_when_asked_for() -> None:
    chosen = sample_tokens(LOGITS, VARIETY, END_TOKENS)
    assert [isinstance(one, SampledToken) and one.logprob is not None for one in chosen] == [
        one.params.logprobs for one in VARIETY
    ]


def test_the_logits_are_left_as_they_are() -> None:
    logits = LOGITS.clone()
    sample_tokens(logits, VARIETY, END_TOKENS)
    assert torch.equal(logits, LOGITS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_float_type_are_read_as_float32(dtype: torch.dtype) -> None:
    logits = LOGITS.to(dtype)
    assert sample_tokens(logits, VARIETY, END_TOKENS) == sample_tokens(logits.float(), VARIETY, END_TOKENS)


def test_no_samples_wanted_gives_none() -> None:
    assert sample_tokens(torch.empty(0, VOCAB), []) == []


def test_tiny_and_huge_temperatures_stay_in_range() -> None:
    assert tokens(LOGITS, [sampled(temperature=5e-324)] * 8) == LOGITS.argmax(dim=-1).tolist()
    assert all(isinstance(token, int) for token in tokens(LOGITS, [sampled(temperature=100.0)] * 8))


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_row_that_is_not_finite_fails_alone(params: dict[str, Any], logprobs: bool) -> None:
    logits = LOGITS[:5].clone()
    logits[1, 7] = float("nan")
    logits[2, 0] = float("inf")
    logits[3, 0] = -float("inf")
    logits[4] = -float("inf")
    whole = tokens(LOGITS[:1], [key(**params)])
    chosen = tokens(logits, [key(**params, logprobs=logprobs)] * 5)
    assert chosen[:1] == whole
    assert chosen[1:3] == [NOT_FINITE] * 2 and isinstance(chosen[3], int) and chosen[4] == NOT_FINITE


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_rules_out_every_token_fails_alone(temperature: float) -> None:
    only_ends = key(temperature=temperature, min_tokens=9, stop_token_ids=tuple(range(VOCAB)))
    assert tokens(LOGITS[:2], [only_ends, key()]) == [NOTHING_LEFT, int(LOGITS[1].argmax())]


def test_failed_rows_still_hold_ids_that_a_next_forward_may_read() -> None:
    logits = torch.full((3, VOCAB), float("nan"))
    plan = plan_samples([key(), sampled(), sampled(top_p=0.5)], END_TOKENS, VOCAB, logits.device)
    samples = plan.choose(logits)
    assert all(0 <= token < VOCAB for token in samples.tokens.tolist())
    assert read_report(samples.report) == [NOT_FINITE] * 3


def test_a_stop_token_that_would_win_is_passed_over_until_the_minimum() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 0], logits[0, 7], logits[0, 9] = 9.0, 8.0, 7.0
    chosen = [
        tokens(logits, [key(position=position, min_tokens=2, stop_token_ids=(7,))])[0] for position in (3, 4, 5, 6)
    ]
    assert chosen == [9, 9, 0, 0]
