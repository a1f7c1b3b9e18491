"""POST /v1/completions: the body as a record."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.openai import errors, fields
from router.openai.generation_fields import IGNORED, SHARED, GenerationFields, read_generation

Prompt = str | list[int]
"""Text, or token ids of the model's own vocabulary."""

_LATER: dict[str, tuple[list[Any], str]] = {
    "suffix": ([""], "the model does not fill in the middle."),
    "echo": ([False], "the prompt is not repeated."),
}
_KNOWN = SHARED | IGNORED | _LATER.keys() | {"prompt", "best_of"}


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    model: str
    prompt: Prompt
    generation: GenerationFields


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Raises ApiError."""
    model = fields.required_string(body, "model")
    prompt = _prompt(body)
    fields.refuse_unknown(body, _KNOWN)
    for name, (harmless, why) in _LATER.items():
        fields.refuse_unless(body, name, harmless, why)
    generation = read_generation(body)
    fields.refuse_unless(body, "best_of", [generation.n], "no more choices are generated than are returned.")
    return CompletionRequest(model, prompt, generation)


def _prompt(body: Mapping[str, Any]) -> Prompt:
    prompt = body.get("prompt")
    if prompt is None:
        raise errors.missing("prompt")
    if isinstance(prompt, list):
        return _from_list(prompt)
    if not isinstance(prompt, str):
        raise errors.wrong_type("prompt", "a string or an array", prompt)
    return prompt


def _from_list(prompt: list[Any]) -> Prompt:
    """A list is token ids, or a batch; a batch of one is taken."""
    if not prompt:
        raise errors.invalid("Invalid 'prompt': empty array.", "prompt")
    if not isinstance(prompt[0], str | list):
        return _token_ids(prompt)
    if len(prompt) > 1:
        raise errors.unsupported("prompt", "Several prompts in one request are not supported yet: send one each.")
    only = prompt[0]
    if isinstance(only, list):
        return _token_ids(only)
    if not only:
        raise errors.invalid("Invalid 'prompt': the only string is empty.", "prompt")
    return str(only)


def _token_ids(tokens: list[Any]) -> list[int]:
    if not tokens:
        raise errors.invalid("Invalid 'prompt': no tokens.", "prompt")
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool):
            raise errors.wrong_type("prompt", "an array of strings, of integers, or of arrays of integers", token)
        if token < 0:
            raise errors.invalid("Invalid 'prompt': token ids are not negative.", "prompt", "integer_below_min_value")
    return tokens
