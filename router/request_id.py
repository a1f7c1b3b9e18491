"""X-Request-Id: the client's name for a request. For logs and the echo only; nothing is ever keyed by it."""

import secrets

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
MAX_CHARACTERS = 256
STATE = "public_id"


def sanitised(raw: bytes) -> str:
    """Printable characters only, at most MAX_CHARACTERS; a fresh id where nothing is left."""
    text = raw.decode("utf-8", errors="replace")
    kept = "".join(character for character in text if character.isprintable()).strip()
    return kept[:MAX_CHARACTERS] or f"req-{secrets.token_hex(16)}"


class RequestIds:
    """ASGI middleware: `request.state.public_id` on the way in, the header on the way out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        public_id = sanitised(dict(scope["headers"]).get(HEADER.lower().encode(), b""))
        scope.setdefault("state", {})[STATE] = public_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).raw.append((HEADER.lower().encode(), public_id.encode()))
            await send(message)

        await self._app(scope, receive, send_with_id)
