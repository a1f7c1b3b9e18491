"""What goes back to the client: whole bodies and stream chunks, in each endpoint's shape."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    def json(self) -> Json:
        total = self.prompt_tokens + self.completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total}


@dataclass(slots=True)
class WholeChoice:
    """One choice as it is collected for a body."""

    text: list[str] = field(default_factory=list)
    finish_reason: str = ""


class Shape(Protocol):
    """One endpoint's shapes. `prompt_param`: its field that carries the prompt. `index`: of the choice."""

    prompt_param: str
    id_prefix: str
    whole: str
    chunk: str

    def choice(self, index: int, text: str, finish_reason: str) -> Json: ...

    def delta(self, index: int, text: str | None, finish_reason: str | None, first: bool) -> Json:
        """`text` None: the choice's closing chunk."""
        ...


class ChatShape:
    prompt_param = "messages"
    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def choice(self, index: int, text: str, finish_reason: str) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def delta(self, index: int, text: str | None, finish_reason: str | None, first: bool) -> Json:
        delta: Json = {"role": "assistant"} if first else {}
        if text is not None or first:
            delta["content"] = text or ""
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


class CompletionShape:
    prompt_param = "prompt"
    id_prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"

    def choice(self, index: int, text: str, finish_reason: str) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def delta(self, index: int, text: str | None, finish_reason: str | None, first: bool) -> Json:
        return {"index": index, "text": text or "", "logprobs": None, "finish_reason": finish_reason}


@dataclass(slots=True)
class Reply:
    """One request's answer. `created`: unix seconds. `extra`: more fields for the last choice's closing chunk, or the
    body."""

    shape: Shape
    key: str
    model: str
    created: int
    include_usage: bool
    _begun: set[int] = field(default_factory=set)

    def body(self, whole: Sequence[WholeChoice], usage: Usage, extra: Mapping[str, Any]) -> Json:
        choices = [self.shape.choice(i, "".join(one.text), one.finish_reason) for i, one in enumerate(whole)]
        return {**self._head(self.shape.whole), "choices": choices, "usage": usage.json(), **extra}

    def text_chunk(self, choice: int, text: str) -> Json:
        return self._chunk([self._delta(choice, text, None)])

    def last_chunk(self, choice: int, finish_reason: str, extra: Mapping[str, Any]) -> Json:
        return {**self._chunk([self._delta(choice, None, finish_reason)]), **extra}

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self._head(self.shape.chunk), "choices": [], "usage": usage.json()}

    def _delta(self, choice: int, text: str | None, finish_reason: str | None) -> Json:
        first = choice not in self._begun
        self._begun.add(choice)
        return self.shape.delta(choice, text, finish_reason, first)

    def _chunk(self, choices: list[Json]) -> Json:
        head = self._head(self.shape.chunk)
        return {**head, "choices": choices, "usage": None} if self.include_usage else {**head, "choices": choices}

    def _head(self, kind: str) -> Json:
        key = self.shape.id_prefix + self.key
        return {"id": key, "object": kind, "created": self.created, "model": self.model}
