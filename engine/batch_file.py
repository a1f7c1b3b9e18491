"""The lines of an offline batch, JSON objects: prompts in, what was generated out."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from engine.errors import InvalidRequest
from engine.generation_output import GenerationOutput, GenerationRequest
from engine.model_tokenizer import ModelTokenizer
from protocol.messages import FinishReason
from protocol.sampling import SamplingParams

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
MAX_SEQUENCES = 1024


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str


class PromptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a line says besides its sampling parameters. Exactly one of the three prompts. `id`: the line's number where
    it names none. The rest is as in GenerationRequest."""

    id: RequestId | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[ChatMessage] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] = 1
    priority: int = 0
    cache_salt: str = ""


class _OnlyId(msgspec.Struct):
    id: RequestId


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    """`line`: of the input. `token_ids` hold the end token, `text` does not show it. `error`: where the finish reason
    is "error". `logprobs`: if asked for."""

    line: int
    id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    finish_reason: FinishReason | None
    error: str | None = None
    logprobs: tuple[float, ...] | msgspec.UnsetType = msgspec.UNSET


def read_line(number: int, raw: bytes, defaults: Mapping[str, Any], tokenizer: ModelTokenizer) -> GenerationRequest:
    """`defaults`: sampling parameters that hold where the line has none of its own. Raises InvalidRequest."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, Any])
        own = {name: fields.pop(name) for name in PromptLine.__struct_fields__ if name in fields}
        line = msgspec.convert(own, PromptLine)
        sampling = msgspec.convert({**defaults, **fields}, SamplingParams)
    except msgspec.DecodeError as error:
        raise InvalidRequest(str(error)) from error
    return GenerationRequest(
        prompt_ids=_prompt_ids(line, tokenizer),
        sampling=sampling,
        request_id=line.id or _default_id(number),
        n=line.n,
        priority=line.priority,
        cache_salt=line.cache_salt,
    )


def output_line(number: int, output: GenerationOutput, tokenizer: ModelTokenizer) -> OutputLine:
    return OutputLine(
        line=number,
        id=output.request_id,
        text=tokenizer.decode(list(output.generated_ids)),
        token_ids=output.generated_ids,
        prompt_tokens=len(output.prompt_ids),
        finish_reason=output.finish_reason,
        error=output.error,
        logprobs=msgspec.UNSET if output.logprobs is None else output.logprobs,
    )


def refused_line(number: int, raw: bytes, error: str) -> OutputLine:
    try:
        name = msgspec.json.decode(raw, type=_OnlyId).id
    except msgspec.DecodeError:
        name = _default_id(number)
    return OutputLine(line=number, id=name, finish_reason=FinishReason.ERROR, error=f"line {number}: {error}")


def _default_id(number: int) -> str:
    return f"line-{number}"


def _prompt_ids(line: PromptLine, tokenizer: ModelTokenizer) -> list[int]:
    prompts = [line.prompt, line.prompt_token_ids, line.messages]
    if sum(prompt is not None for prompt in prompts) != 1:
        raise InvalidRequest("exactly one of prompt, prompt_token_ids and messages must be given")
    if line.prompt_token_ids is not None:
        return line.prompt_token_ids
    if line.messages is not None:
        return tokenizer.encode_chat([msgspec.to_builtins(message) for message in line.messages])
    assert line.prompt is not None
    return tokenizer.encode(line.prompt)
