"""The fields that both endpoints share: how to choose tokens, when to stop, how to answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.sampling import SamplingParams
from router.openai import errors, fields

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 256
MAX_CHOICES = 128
GREEDY_BELOW = 1e-4
"""Below this temperature the logits would overflow long before the choice changed: greedy."""
SMALLEST_TOP_P = 1e-6
SEED_MASK = (1 << 63) - 1

SHARED = frozenset(
    {"model", "max_tokens", "temperature", "top_p", "seed", "ignore_eos", "stop", "stream", "stream_options", "n"}
    | {"logprobs", "logit_bias", "presence_penalty", "frequency_penalty"}
)
"""Read or refused here."""
IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Sent by well-behaved clients and without effect on the answer."""


@dataclass(frozen=True, slots=True)
class GenerationFields:
    """`max_tokens` None: the router's default. `max_tokens_param`: how the client called it."""

    max_tokens: int | None
    max_tokens_param: str
    temperature: float
    top_p: float
    seed: int | None
    ignore_eos: bool
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=0.0 if self.temperature < GREEDY_BELOW else self.temperature,
            top_p=max(self.top_p, SMALLEST_TOP_P),
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )


def read_generation(body: Mapping[str, Any], max_tokens_param: str = "max_tokens") -> GenerationFields:
    """Raises ApiError."""
    _refuse_what_comes_later(body)
    temperature = fields.number(body, "temperature", 0, 2)
    top_p = fields.number(body, "top_p", 0, 1)
    seed = fields.integer(body, "seed", -(1 << 63), SEED_MASK)
    stream = fields.boolean(body, "stream")
    return GenerationFields(
        max_tokens=fields.integer(body, max_tokens_param, 1),
        max_tokens_param=max_tokens_param,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        seed=None if seed is None else seed & SEED_MASK,
        ignore_eos=fields.boolean(body, "ignore_eos"),
        stop=_stop_strings(body.get("stop")),
        stream=stream,
        include_usage=_include_usage(body.get("stream_options"), stream),
    )


def _refuse_what_comes_later(body: Mapping[str, Any]) -> None:
    if (fields.integer(body, "n", 1, MAX_CHOICES) or 1) > 1:
        raise errors.unsupported("n", "'n' above 1 is not supported yet: send one request per choice.")
    fields.refuse_unless(body, "logprobs", [False], "log probabilities are not returned.")
    fields.refuse_unless(body, "logit_bias", [{}], "tokens cannot be biased.")
    for penalty in ("presence_penalty", "frequency_penalty"):
        if fields.number(body, penalty, -2, 2):
            raise errors.unsupported(penalty, f"'{penalty}' is not supported yet: only 0 is.")


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise errors.wrong_type("stop", "a string or an array of strings", value)
    if len(stops) > MAX_STOP_STRINGS:
        raise errors.invalid(
            f"Invalid 'stop': at most {MAX_STOP_STRINGS} strings, got {len(stops)}.", "stop", "array_above_max_length"
        )
    for stop in stops:
        _check_stop_string(stop)
    return tuple(stops)


def _check_stop_string(stop: object) -> None:
    if not isinstance(stop, str):
        raise errors.wrong_type("stop", "a string or an array of strings", stop)
    if not stop:
        raise errors.invalid("Invalid 'stop': a stop string must not be empty.", "stop", "invalid_value")
    if len(stop) > MAX_STOP_CHARACTERS:
        raise errors.invalid(
            f"Invalid 'stop': at most {MAX_STOP_CHARACTERS} characters each.", "stop", "string_above_max_length"
        )


def _include_usage(options: object, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise errors.invalid("'stream_options' is only allowed when 'stream' is enabled.", "stream_options")
    if not isinstance(options, dict):
        raise errors.wrong_type("stream_options", "an object", options)
    include = options.get("include_usage")
    if include is not None and not isinstance(include, bool):
        raise errors.wrong_type("stream_options.include_usage", "a boolean", include)
    for name in options.keys() - {"include_usage", "include_obfuscation"}:
        raise errors.invalid(f"Unknown stream option: {name[:100]}", "stream_options", "unknown_parameter")
    return bool(include)
