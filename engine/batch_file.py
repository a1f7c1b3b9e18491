"""The lines of an offline batch, JSON objects: prompts in, what was generated out."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

from engine.errors import InvalidRequest
from engine.generation_output import GenerationOutput, GenerationRequest
from engine.limits import MAX_SEQUENCES
from engine.model_tokenizer import ModelTokenizer
from protocol.messages import FinishReason
from protocol.sampling import Bias, SamplingParams, TokenId

TextId = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
LineId = TextId | int
OTHER_NAMES = {
    "max_tokens": "did you mean max_new_tokens?",
    "max_completion_tokens": "did you mean max_new_tokens?",
    "stop": "stop strings are not offered here, stop_token_ids are.",
}
"""Fields of other interfaces, and what to say to them."""


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str


class PromptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a line says besides its sampling parameters."""

    id: LineId | None = None
    """Of its result, as it is spelt here. By default "line-" and the line's number."""
    prompt: str | None = None
    """Text to go on with. A line has this, prompt_token_ids or messages."""
    prompt_token_ids: list[int] | None = None
    """The prompt as token ids, used as they are."""
    messages: list[ChatMessage] | None = None
    """A conversation for the model's chat template."""
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] = 1
    """Sequences to generate, each with a result of its own."""
    priority: int = 0
    """Lower ones are admitted first."""
    cache_salt: str = ""
    """Only lines of the same salt share cached blocks."""


class ParsedLine(NamedTuple):
    """`id`: as the line spells it; the request has it as text."""

    id: LineId
    wanted: GenerationRequest


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's result."""

    line: int
    """Number of the input line, from 1."""
    id: LineId
    """As the line gave it. With n above 1, the further sequences are called `ID__child#1` and so on."""
    index: int = 0
    """Number of the sequence among those of its line: 0 for `ID`, 1 for `ID__child#1` and so on."""
    text: str = ""
    """What was generated, special tokens such as the end token left out."""
    token_ids: tuple[int, ...] = ()
    """What was generated, the end token included."""
    prompt_tokens: int = 0
    """Length of the prompt."""
    finish_reason: FinishReason | None
    """"stop" at an end or stop token; "length" at max_new_tokens or at the end of the model's context; "error"."""
    error: str | None = None
    """What went wrong, where finish_reason is "error"; token_ids then has what was generated before."""
    logprobs: tuple[float, ...] | msgspec.UnsetType = msgspec.UNSET
    """One per generated token; only there if the line asked for them."""


def read_line(number: int, raw: bytes, defaults: Mapping[str, Any], tokenizer: ModelTokenizer) -> ParsedLine:
    """`defaults`: sampling parameters that hold where the line has none of its own. Raises InvalidRequest."""
    try:
        fields = _given_fields(raw)
        own = {name: fields.pop(name) for name in PromptLine.__struct_fields__ if name in fields}
        line = msgspec.convert(own, PromptLine)
        sampling = msgspec.convert({**defaults, **fields}, SamplingParams)
    except msgspec.DecodeError as error:
        raise InvalidRequest(str(error)) from error
    name = _default_id(number) if line.id is None else line.id
    wanted = GenerationRequest(
        prompt_ids=_prompt_ids(line, tokenizer),
        sampling=sampling,
        request_id=str(name),
        n=line.n,
        priority=line.priority,
        cache_salt=line.cache_salt,
    )
    return ParsedLine(name, wanted)


def output_line(number: int, name: LineId, output: GenerationOutput, tokenizer: ModelTokenizer) -> OutputLine:
    return OutputLine(
        line=number,
        id=name,
        index=output.sequence_index,
        text=tokenizer.decode(list(output.generated_ids)),
        token_ids=output.generated_ids,
        prompt_tokens=len(output.prompt_ids),
        finish_reason=output.finish_reason,
        error=output.error,
        logprobs=msgspec.UNSET if output.logprobs is None else output.logprobs,
    )


class _OnlyId(msgspec.Struct):
    id: LineId


def refused_line(number: int, raw: bytes, error: str) -> OutputLine:
    try:
        name = msgspec.json.decode(raw, type=_OnlyId).id
    except msgspec.DecodeError:
        name = _default_id(number)
    return OutputLine(line=number, id=name, finish_reason=FinishReason.ERROR, error=f"line {number}: {error}")


def _default_id(number: int) -> str:
    return f"line-{number}"


def _given_fields(raw: bytes) -> dict[str, Any]:
    """Those that are not null, which stands for the default. Raises InvalidRequest, msgspec.DecodeError."""
    fields = msgspec.json.decode(raw, type=dict[str, Any])
    known = (*PromptLine.__struct_fields__, *SamplingParams.__struct_fields__)
    for name in fields:
        if name not in known:
            raise InvalidRequest(f"there is no field {name!r}{_advice(name, known)} Known are {', '.join(known)}")
    if isinstance(fields.get("logit_bias"), dict):
        fields["logit_bias"] = _pairs(fields["logit_bias"])
    return {name: value for name, value in fields.items() if value is not None}


def _advice(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    advice = OTHER_NAMES.get(name) or (f"did you mean {near[0]}?" if near else "")
    return f": {advice}" if advice else "."


def _pairs(biases: dict[str, Any]) -> list[tuple[int, float]]:
    """From OpenAI's form, an object of token ids as text."""
    try:
        return list(msgspec.convert(biases, dict[TokenId, Bias], str_keys=True).items())
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"logit_bias: {error}") from error


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
