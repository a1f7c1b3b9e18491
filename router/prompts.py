"""From a parsed request to what the cluster runs: prompt tokens and limits."""

import asyncio
from collections.abc import Callable

from router.chat_template import TemplateRefused
from router.openai import errors
from router.openai.chat import ChatRequest
from router.openai.completions import CompletionRequest
from router.openai.generation_fields import GenerationFields
from router.openai.sampling_fields import check_vocabulary
from router.tokenizer import Tokenizer


class Prompts:
    """Encodes off the event loop: a long prompt takes a while. `model_context`: most tokens of a request that the model
    takes; `max_context`: that the nodes have room for, too, now."""

    def __init__(
        self, tokenizer: Tokenizer, model_context: int, max_context: Callable[[], int], default_max_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._model_context = model_context
        self._max_context = max_context
        self._default_max_tokens = default_max_tokens

    async def of_chat(self, request: ChatRequest) -> list[int]:
        """Raises ApiError."""
        if not self._tokenizer.has_chat_template:
            raise errors.unsupported("messages", "This model has no chat template: use /v1/completions.")
        try:
            tokens = await asyncio.to_thread(self._tokenizer.encode_chat, request.messages)
        except TemplateRefused as error:
            raise errors.invalid(str(error), "messages") from error
        return _not_empty(tokens, "messages")

    async def of_completion(self, request: CompletionRequest) -> list[int]:
        """Raises ApiError."""
        if isinstance(request.prompt, str):
            return _not_empty(await asyncio.to_thread(self._tokenizer.encode, request.prompt), "prompt")
        if max(request.prompt) >= self._tokenizer.vocabulary_size:
            raise errors.invalid(
                f"Invalid 'prompt': token ids are below {self._tokenizer.vocabulary_size}.",
                "prompt",
                "integer_above_max_value",
            )
        return request.prompt

    def check_vocabulary(self, wanted: GenerationFields) -> None:
        """Raises ApiError where a token is named that the model does not have."""
        check_vocabulary(wanted.chosen, self._tokenizer.vocabulary_size)

    def max_new_tokens(self, prompt_tokens: int, wanted: GenerationFields, prompt_param: str) -> int:
        """As many as the client asked for, else what fits, up to the default. Raises ApiError where it does not fit."""
        limit, asked = self._max_context(), wanted.max_tokens
        if asked is not None and asked > limit:
            name = wanted.max_tokens_param
            raise errors.invalid(f"'{name}' is too large: this model's context holds {self._tokens(limit)}.", name)
        if prompt_tokens + (asked or 1) > limit:
            raise errors.too_long(
                f"This model's maximum context length is {self._tokens(limit)}. However, your request "
                f"has {prompt_tokens} tokens in the {prompt_param} and asks for {asked or 'at least 1'} more.",
                prompt_param,
            )
        return asked if asked is not None else min(self._default_max_tokens, limit - prompt_tokens)

    def _tokens(self, limit: int) -> str:
        """As many, and what sets the limit if the model does not."""
        if limit >= self._model_context:
            return f"{limit} tokens"
        own = f"its own {self._model_context}"
        return f"{limit} tokens here, as the nodes' KV cache (--num-blocks times --page-size) is smaller than {own}"


def _not_empty(tokens: list[int], param: str) -> list[int]:
    if not tokens:
        raise errors.invalid(f"Invalid '{param}': it holds no tokens.", param)
    return tokens
