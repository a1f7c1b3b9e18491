"""Sampling parameters that were made in this process are checked as those from the wire, and against the vocabulary."""

from typing import Any

import pytest

from engine.sampling_limits import sampling_refusal
from protocol.sampling import SamplingParams

VOCAB = 100


def refusal(**params: Any) -> str | None:
    return sampling_refusal(SamplingParams(**{"max_new_tokens": 5, **params}), VOCAB)


def test_what_can_be_served_is_not_refused() -> None:
    assert refusal() is None
    assert refusal(temperature=0.5, logit_bias=((99, -100.0),), stop_token_ids=(0, 99), top_k=1 << 40) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_k", -1),
        ("top_k", "5"),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("logit_bias", ((5, float("inf")),)),
        ("stop_token_ids", (-1,)),
        ("logprobs", 1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    reason = refusal(**{field: value})
    assert reason is not None and f"$.{field}" in reason


@pytest.mark.parametrize(("field", "value"), [("logit_bias", ((5, 1.0), (VOCAB, 1.0))), ("stop_token_ids", (VOCAB,))])
def test_a_token_beyond_the_vocabulary_is_refused_by_name(field: str, value: object) -> None:
    assert refusal(**{field: value}) == f"{field} names token {VOCAB}, the vocabulary ends at {VOCAB - 1}"
