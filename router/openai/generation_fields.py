"""The fields that both endpoints share: how to choose tokens, when to stop, how to answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from protocol.messages import MAX_CHOICES
from protocol.sampling import SamplingParams
from router.openai import errors, fields
from router.openai.sampling_fields import SAMPLING, read_sampling

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 256

SHARED = SAMPLING | {"model", "max_tokens", "stop", "stream", "stream_options", "n", "logprobs"}
"""Read or refused here."""
IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Sent by well-behaved clients and without effect on the answer."""


@dataclass(frozen=True, slots=True)
class GenerationFields:
    """`max_tokens` None: the router's default. `max_tokens_param`: how the client called it. `chosen`: how tokens are
    chosen, without a limit. `n`: choices wanted."""

    max_tokens: int | None
    max_tokens_param: str
    chosen: SamplingParams
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    n: int

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        return msgspec.structs.replace(self.chosen, max_new_tokens=max_new_tokens)


def read_generation(body: Mapping[str, Any], max_tokens_param: str = "max_tokens") -> GenerationFields:
    """Raises ApiError."""
    fields.refuse_unless(body, "logprobs", [False], "log probabilities are not returned.")
    chosen = read_sampling(body)
    max_tokens = fields.integer(body, max_tokens_param, 1)
    if max_tokens is not None and chosen.min_tokens > max_tokens:
        raise errors.invalid(f"Invalid 'min_tokens': above '{max_tokens_param}'.", "min_tokens", "invalid_value")
    stream = fields.boolean(body, "stream")
    return GenerationFields(
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        chosen=chosen,
        stop=_stop_strings(body.get("stop")),
        stream=stream,
        include_usage=_include_usage(body.get("stream_options"), stream),
        n=fields.integer(body, "n", 1, MAX_CHOICES) or 1,
    )


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
