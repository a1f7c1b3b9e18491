"""Server-sent events: their bytes, keep-alive while nothing comes, and one error event instead of [DONE]."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.disconnect import ClientGone, unless_gone
from router.openai.errors import ApiError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event_bytes(value: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class LateStart:
    """A stream whose first event decides whether there is a stream at all.

    `begin` waits for the first event, at most `keep_alive_s`: an ApiError until then is raised and can still become an
    HTTP status. After that `events` yields every event, comments while none comes, and an ApiError as an event.
    """

    def __init__(self, source: AsyncGenerator[bytes, None], keep_alive_s: float) -> None:
        self._source = source
        self._keep_alive_s = keep_alive_s
        self._next: asyncio.Future[bytes] = asyncio.ensure_future(anext(source))

    async def begin(self) -> None:
        """Raises ApiError, with everything closed."""
        try:
            await asyncio.wait({self._next}, timeout=self._keep_alive_s)
            if self._next.done() and (error := self._next.exception()) is not None:
                raise error
        except BaseException:
            await self.close()
            raise

    async def events(self) -> AsyncIterator[bytes]:
        while True:
            done, _ = await asyncio.wait({self._next}, timeout=self._keep_alive_s)
            if not done:
                yield KEEP_ALIVE
                continue
            try:
                value = self._next.result()
            except StopAsyncIteration:
                return
            except ApiError as error:
                yield event_bytes(error.body())
                return
            yield value
            self._next = asyncio.ensure_future(anext(self._source))

    async def close(self) -> None:
        """Aborts what has not ended."""
        self._next.cancel()
        with suppress(asyncio.CancelledError, StopAsyncIteration, ApiError):
            await self._next
        await self._source.aclose()


class EventStream(Response):
    """Sends a begun stream, and closes it when it ends or the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, stream: LateStart, headers: Mapping[str, str]) -> None:
        super().__init__(None, headers={"Cache-Control": "no-cache", **headers})
        del self.headers["content-length"]
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):
                await unless_gone(receive, self._send(send))
        finally:
            await self._stream.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._stream.events():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
