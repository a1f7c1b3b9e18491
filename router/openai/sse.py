"""Server-sent events: their bytes, and a response whose first event decides whether there is a stream at all."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.disconnect import ClientGone, unless_gone
from router.openai.errors import ApiError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

Events = AsyncGenerator[bytes, None]
"""Encoded events. May raise ApiError at any point, as its last act."""


def event_bytes(value: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def first_event(events: Events) -> bytes:
    """An ApiError raised here can still become an HTTP status."""
    return await anext(events)


class EventStream(Response):
    """Sends `first` and then `events`; an ApiError becomes one error event, the last. Closes `events` when the client
    leaves, or has not taken all of it after `limit_s`: a client that does not read must not hold a place for ever."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: Events, limit_s: float) -> None:
        super().__init__(None, headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._limit_s = limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone, TimeoutError):
                async with asyncio.timeout(self._limit_s):
                    await unless_gone(receive, self._send(send))
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await _send_part(send, self._first)
        try:
            async for data in self._events:
                await _send_part(send, data)
        except ApiError as error:
            await _send_part(send, event_bytes(error.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
