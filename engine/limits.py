"""What a request may ask for, and when it is complete. Pure."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import msgspec

from engine.errors import CapacityExceeded, InvalidRequest
from engine.request import Request
from engine.sampling_limits import sampling_refusal

MAX_SEQUENCES = 1024
"""Of one prompt."""


@dataclass(frozen=True)
class Limits:
    """`cache_tokens`: what the whole pool holds. `max_positions`: what the model was made for."""

    vocab_size: int
    max_positions: int
    cache_tokens: int
    eos_token_ids: frozenset[int]

    @property
    def max_context(self) -> int:
        """Tokens (prompt and new) that one request may ever hold."""
        return min(self.cache_tokens, self.max_positions)

    def validate(self, request: Request) -> None:
        """Raises InvalidRequest or CapacityExceeded."""
        if not request.prompt:
            raise InvalidRequest(f"request {request.id!r}: the prompt is empty")
        if refusal := _refusal(request):
            raise InvalidRequest(f"request {request.id!r}: {refusal}")
        if refusal := sampling_refusal(request.sampling, self.vocab_size):
            raise InvalidRequest(f"request {request.id!r}: {refusal}")
        if not self._are_tokens(request.prompt):
            wrong = next(token for token in request.prompt if not self._are_tokens([token]))
            raise InvalidRequest(f"request {request.id!r}: {wrong!r} is no token id of 0..{self.vocab_size - 1}")
        if len(request.prompt) > self.max_context:
            limit = "the cache holds" if self.cache_tokens < self.max_positions else "the model's context holds"
            raise CapacityExceeded(
                f"request {request.id!r}: a prompt of {len(request.prompt)} tokens can never fit:"
                f" {limit} {self.max_context}"
            )

    def _are_tokens(self, prompt: list[int]) -> bool:
        try:
            msgspec.convert(prompt, self._token_ids)
        except msgspec.ValidationError:
            return False
        return True

    @cached_property
    def _token_ids(self) -> Any:
        """The type of a list of them: msgspec checks thousands of tokens in the time that Python takes for a few
        hundred."""
        return list[Annotated[int, msgspec.Meta(ge=0, lt=self.vocab_size)]]

    def token_limit(self, request: Request) -> int:
        """Tokens, prompt and new, at which it is complete at the latest."""
        return min(len(request.prompt) + request.sampling.max_new_tokens, self.max_positions)

    def end_tokens(self, request: Request) -> frozenset[int]:
        """Tokens that end it."""
        own = frozenset(request.sampling.stop_token_ids)
        return own if request.sampling.ignore_eos else own | self.eos_token_ids


def _refusal(request: Request) -> str | None:
    """What is wrong with it, whatever the model."""
    if type(request.n) is not int or not 1 <= request.n <= (1 if request.prefill_only else MAX_SEQUENCES):
        return f"{request.n!r} sequences of it cannot be generated"
    if type(request.priority) is not int:
        return f"its priority must be an integer, not {request.priority!r}"
    try:
        request.cache_salt.encode()
    except (AttributeError, UnicodeEncodeError):
        return f"its cache_salt must be text, not {request.cache_salt!r}"
    return None
