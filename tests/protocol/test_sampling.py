"""Sampling parameters on the wire: whole, off by default, and refused by name out of range."""

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import BadFrame, decode, encode
from protocol.sampling import MAX_BIASED_TOKENS, MAX_STOP_TOKENS, SamplingParams

LONGEST = (1 << 53) - 1
TOKENS = st.integers(0, (1 << 31) - 1)
EVERYTHING = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(0, LONGEST),
    min_tokens=st.integers(0, LONGEST),
    stop_token_ids=st.lists(TOKENS, max_size=5).map(tuple),
    ignore_eos=st.booleans(),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, LONGEST),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(0, (1 << 63) - 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.lists(st.tuples(TOKENS, st.floats(-100, 100)), max_size=5).map(tuple),
    logprobs=st.booleans(),
)


@given(EVERYTHING)
def test_parameters_survive_the_wire(params: SamplingParams) -> None:
    arrived: SamplingParams = decode(encode(params), SamplingParams)
    assert arrived == params and hash(arrived) == hash(params)


def test_the_longest_lists_survive_the_wire() -> None:
    bias, stops = tuple((i, 0.5) for i in range(MAX_BIASED_TOKENS)), tuple(range(MAX_STOP_TOKENS))
    params = SamplingParams(max_new_tokens=1, logit_bias=bias, stop_token_ids=stops)
    assert decode(encode(params), SamplingParams) == params


def test_only_the_token_limit_must_be_given_and_all_else_is_off() -> None:
    params: SamplingParams = decode(msgpack.packb({"max_new_tokens": 7}), SamplingParams)
    assert params == SamplingParams(max_new_tokens=7)
    assert not params.needs_history and not params.penalises_output


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", -1),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1 << 53),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 1 << 63),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 101.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", [[5, 101.0]]),
        ("logit_bias", [[-5, 1.0]]),
        ("logit_bias", [[5]]),
        ("logit_bias", [[5, 0.5]] * (MAX_BIASED_TOKENS + 1)),
        ("stop_token_ids", [1 << 31]),
        ("stop_token_ids", [5] * (MAX_STOP_TOKENS + 1)),
        ("logprobs", 1),
        ("best_of", 2),
    ],
)
def test_what_does_not_fit_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadFrame, match=field):
        decode(msgpack.packb({"max_new_tokens": 1, field: value}), SamplingParams)


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_need_the_history_and_nothing_else_does(field: str) -> None:
    params: dict[str, Any] = {field: 1.5}
    assert SamplingParams(max_new_tokens=1, **params).needs_history
    rest = SamplingParams(max_new_tokens=1, temperature=1.0, top_k=3, logit_bias=((1, 1.0),), min_tokens=1)
    assert not rest.needs_history
