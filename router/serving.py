"""The two generating endpoints: parse, encode, run, answer."""

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.config import RouterConfig
from router.disconnect import unless_gone
from router.generation import TextChoiceEnded, TextDelta, TextEnded, TextGenerator, TextRequest
from router.ledger import HEADER as LEDGER_HEADER
from router.ledger import report
from router.openai import errors
from router.openai.chat import parse_chat
from router.openai.completions import parse_completion
from router.openai.generation_fields import GenerationFields
from router.openai.json_body import read_object
from router.openai.replies import ChatShape, CompletionShape, Reply, Shape, Usage, WholeChoice
from router.openai.sse import DONE, KEEP_ALIVE, EventStream, event_bytes, first_event
from router.prompts import Prompts
from router.queueing import RequestFailed
from router.request_id import STATE
from router.token_request import Idle, Restarted, TokenRequest

UNREAD_S = 10.0
"""How long after its deadline a stream may wait for a client that does not read."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request, ready to run, and how to answer it."""

    text_request: TextRequest
    reply: Reply

    @property
    def token_request(self) -> TokenRequest:
        return self.text_request.token_request

    def usage(self, ended: TextEnded) -> Usage:
        return Usage(len(self.token_request.prompt), ended.completion_tokens)

    def extra(self, ended: TextEnded) -> Mapping[str, Any]:
        return report(self.token_request.key, ended) if self.text_request.wants_ledger else {}


class Serving:
    """`clock`: monotonic seconds."""

    def __init__(
        self,
        config: RouterConfig,
        prompts: Prompts,
        generator: TextGenerator,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._generator = generator
        self._clock = clock

    async def chat(self, request: Request) -> Response:
        """Raises ApiError, ClientGone, ClientDisconnect."""
        received_at = self._clock()
        self._check_room()
        parsed = parse_chat(await read_object(request, self._config.max_body_bytes))
        self._check_model(parsed.model)
        prompt = await self._prompts.of_chat(parsed)
        return await self._answer(request, self._exchange(request, ChatShape(), parsed.generation, prompt, received_at))

    async def complete(self, request: Request) -> Response:
        """Raises ApiError, ClientGone, ClientDisconnect."""
        received_at = self._clock()
        self._check_room()
        parsed = parse_completion(await read_object(request, self._config.max_body_bytes))
        self._check_model(parsed.model)
        prompt = await self._prompts.of_completion(parsed)
        exchange = self._exchange(request, CompletionShape(), parsed.generation, prompt, received_at)
        return await self._answer(request, exchange)

    def _check_room(self) -> None:
        """First of all: under overload the refusal must cost next to nothing."""
        try:
            self._generator.check_room()
        except RequestFailed as failed:
            raise errors.of_failure(failed.failure, "") from failed

    def _check_model(self, model: str) -> None:
        if model != self._config.served_model:
            raise errors.unknown_model(model[:200])

    def _exchange(
        self, request: Request, shape: Shape, wanted: GenerationFields, prompt: list[int], received_at: float
    ) -> _Exchange:
        self._prompts.check_vocabulary(wanted)
        max_new_tokens = self._prompts.max_new_tokens(len(prompt), wanted, shape.prompt_param)
        token_request = TokenRequest(
            key=secrets.token_hex(16),
            public_id=getattr(request.state, STATE),
            prompt=prompt,
            sampling=wanted.sampling(max_new_tokens),
            received_at=received_at,
            deadline=received_at + self._config.deadline_s,
            n=wanted.n,
        )
        wants_ledger = request.headers.get(LEDGER_HEADER) == "1"
        text_request = TextRequest(token_request, wanted.stop, wanted.stream, wants_ledger)
        model, created = self._config.served_model, int(time.time())
        return _Exchange(text_request, Reply(shape, token_request.key, model, created, wanted.include_usage))

    async def _answer(self, request: Request, exchange: _Exchange) -> Response:
        if not exchange.text_request.shows_text_early:
            return await unless_gone(request.receive, self._whole(exchange))
        events = self._chunks(exchange)
        first = await unless_gone(request.receive, first_event(events))
        limit_s = exchange.token_request.deadline - self._clock() + UNREAD_S
        return EventStream(first, events, limit_s)

    async def _whole(self, exchange: _Exchange) -> Response:
        choices = _no_text(exchange)
        try:
            async with aclosing(self._generator.generate(exchange.text_request)) as said:
                async for text_event in said:
                    if isinstance(text_event, TextDelta):
                        choices[text_event.choice].text.append(text_event.text)
                    elif isinstance(text_event, Restarted):
                        choices = _no_text(exchange)
                    elif isinstance(text_event, TextChoiceEnded | TextEnded):
                        choices[text_event.choice].finish_reason = text_event.finish_reason
                        ended = text_event
        except RequestFailed as failed:
            raise errors.of_failure(failed.failure, exchange.reply.shape.prompt_param) from failed
        assert isinstance(ended, TextEnded)
        body = exchange.reply.body(choices, exchange.usage(ended), exchange.extra(ended))
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def _chunks(self, exchange: _Exchange) -> AsyncGenerator[bytes, None]:
        """A restart needs no chunk: it happens only while nothing was shown."""
        reply = exchange.reply
        try:
            async with aclosing(self._generator.generate(exchange.text_request)) as said:
                async for text_event in said:
                    if isinstance(text_event, TextDelta):
                        yield event_bytes(reply.text_chunk(text_event.choice, text_event.text))
                    elif isinstance(text_event, Idle):
                        yield KEEP_ALIVE
                    elif isinstance(text_event, TextChoiceEnded):
                        yield event_bytes(reply.last_chunk(text_event.choice, text_event.finish_reason, {}))
                    elif isinstance(text_event, TextEnded):
                        choice, extra = text_event.choice, exchange.extra(text_event)
                        yield event_bytes(reply.last_chunk(choice, text_event.finish_reason, extra))
                        if reply.include_usage:
                            yield event_bytes(reply.usage_chunk(exchange.usage(text_event)))
            yield DONE
        except RequestFailed as failed:
            raise errors.of_failure(failed.failure, reply.shape.prompt_param) from failed


def _no_text(exchange: _Exchange) -> list[WholeChoice]:
    return [WholeChoice() for _ in range(exchange.token_request.n)]
