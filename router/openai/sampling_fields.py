"""How to choose tokens: OpenAI's fields, and those that vLLM adds to them, as sampling parameters."""

from collections.abc import Mapping
from typing import Any

from protocol.sampling import MAX_BIASED_TOKENS, MAX_STOP_TOKENS, SamplingParams
from router.openai import errors, fields

GREEDY_BELOW = 1e-4
"""Below this temperature the logits would overflow long before the choice changed: greedy."""
SMALLEST_TOP_P = 1e-6
SMALLEST_REPETITION_PENALTY, LARGEST_REPETITION_PENALTY = 0.01, 100
SEED_MASK = (1 << 63) - 1
LARGEST_COUNT = (1 << 53) - 1
MAX_TOKEN_DIGITS = 10

SAMPLING = frozenset(
    {"temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias"}
    | {"top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"}
)
"""Read here. The second line is vLLM's."""


def read_sampling(body: Mapping[str, Any]) -> SamplingParams:
    """Everything but `max_new_tokens`, which is 0. Raises ApiError."""
    top_p = fields.number(body, "top_p", 0, 1)
    seed = fields.integer(body, "seed", -(1 << 63), SEED_MASK)
    repetition = fields.number(body, "repetition_penalty", SMALLEST_REPETITION_PENALTY, LARGEST_REPETITION_PENALTY)
    return SamplingParams(
        max_new_tokens=0,
        min_tokens=fields.integer(body, "min_tokens", 0, LARGEST_COUNT) or 0,
        stop_token_ids=fields.token_ids(body, "stop_token_ids", MAX_STOP_TOKENS),
        ignore_eos=fields.boolean(body, "ignore_eos"),
        temperature=_temperature(body),
        top_k=max(fields.integer(body, "top_k", -1, LARGEST_COUNT) or 0, 0),
        top_p=1.0 if top_p is None else max(top_p, SMALLEST_TOP_P),
        min_p=fields.number(body, "min_p", 0, 1) or 0.0,
        seed=None if seed is None else seed & SEED_MASK,
        repetition_penalty=1.0 if repetition is None else repetition,
        presence_penalty=fields.number(body, "presence_penalty", -2, 2) or 0.0,
        frequency_penalty=fields.number(body, "frequency_penalty", -2, 2) or 0.0,
        logit_bias=_logit_bias(body.get("logit_bias")),
    )


def _temperature(body: Mapping[str, Any]) -> float:
    temperature = fields.number(body, "temperature", 0, 2)
    if temperature is None:
        return 1.0
    return 0.0 if temperature < GREEDY_BELOW else temperature


def check_vocabulary(sampling: SamplingParams, vocabulary_size: int) -> None:
    """Raises ApiError where a token is named that the model does not have."""
    for name, tokens in (
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        if tokens and max(tokens) >= vocabulary_size:
            message = f"Invalid '{name}': token ids are below {vocabulary_size}."
            raise errors.invalid(message, name, "integer_above_max_value")


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise errors.wrong_type("logit_bias", "an object", value)
    if len(value) > MAX_BIASED_TOKENS:
        message = f"Invalid 'logit_bias': at most {MAX_BIASED_TOKENS} tokens, got {len(value)}."
        raise errors.invalid(message, "logit_bias", "object_above_max_properties")
    return tuple((_token(name), fields.as_number(bias, "logit_bias", -100, 100)) for name, bias in value.items())


def _token(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) <= MAX_TOKEN_DIGITS):
        message = f"Invalid key in 'logit_bias': '{name[:100]}' is no token id."
        raise errors.invalid(message, "logit_bias", "invalid_value")
    return int(name)
