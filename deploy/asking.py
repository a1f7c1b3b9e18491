"""Ask a router several questions at once, streaming, and keep what came back with each request's ledger."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from deploy.prompts import Question
from protocol.ledger import Ledger

LEDGER_HEADER = {"X-Kvferry-Ledger": "1"}
ANSWER_TIMEOUT_S = 180.0


class ServedLedger(Ledger, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The router's view of one request, on top of the node's. The parts sum to `ttft_s` (see `parts`). `tps`: tokens
    per second after the first; None where there was but one."""

    ttft_s: float
    router_queue_s: float
    other_s: float
    tps: float | None

    @property
    def parts(self) -> tuple[float, float, float, float, float]:
        """Queue, prefill, exposed KV transfer, first decode step, other."""
        queue = self.router_queue_s + self.queue_s
        return queue, self.prefill_s, self.exposed_transfer_s, self.first_step_s, self.other_s


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    kvferry: ServedLedger | None = None
    error: dict[str, Any] | None = None


@dataclass(slots=True)
class Answer:
    """What one question got. `failure`: why it has no whole answer, or None."""

    question: Question
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    ledger: ServedLedger | None = None
    failure: str | None = None

    def take(self, chunk: _Chunk) -> None:
        """Add one event of the stream."""
        for choice in chunk.choices:
            self.text += choice.delta.content or ""
            self.finish_reason = choice.finish_reason or self.finish_reason
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage.prompt_tokens
            self.output_tokens = chunk.usage.completion_tokens
        self.ledger = chunk.kvferry or self.ledger
        if chunk.error is not None:
            self.failure = str(chunk.error.get("message", chunk.error))

    def close(self) -> None:
        """After the stream's end: an answer without its end is a failure."""
        if self.failure is None and self.finish_reason is None:
            self.failure = "the stream ended before the answer did"
        if self.failure is None and self.ledger is None:
            self.failure = "the answer came without its ledger"


def ask_all(endpoint: str, model: str, questions: Sequence[Question]) -> list[Answer]:
    """Ask all at once; returns when every stream has ended. Failures are in the answers."""
    return asyncio.run(_ask_all(endpoint, model, questions))


async def _ask_all(endpoint: str, model: str, questions: Sequence[Question]) -> list[Answer]:
    async with httpx.AsyncClient(base_url=endpoint, timeout=ANSWER_TIMEOUT_S, trust_env=False) as http:
        return await asyncio.gather(*(_ask(http, model, question) for question in questions))


async def _ask(http: httpx.AsyncClient, model: str, question: Question) -> Answer:
    answer = Answer(question)
    body = {
        "model": model,
        "messages": list(question.messages),
        "max_tokens": question.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body, headers=LEDGER_HEADER) as response:
            if response.status_code != httpx.codes.OK:
                answer.failure = f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')}"
                return answer
            async for data in _events(response):
                answer.take(msgspec.json.decode(data, type=_Chunk))
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        answer.failure = f"{type(error).__name__}: {error}"
    answer.close()
    return answer


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each server-sent event, without the closing [DONE]. Comments (keep-alives) are skipped."""
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield line.removeprefix("data: ")
