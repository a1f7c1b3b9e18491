"""Reading an untrusted request body: bounded in size, time and depth, strict JSON, one object."""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request

from router.openai import errors

BODY_TIMEOUT_S = 30.0


async def read_object(request: Request, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> dict[str, Any]:
    """The body as a JSON object. A repeated key: the last one counts. Raises ApiError, ClientDisconnect."""
    _check_media_type(request.headers.get("content-type"))
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(request, max_bytes)
    except TimeoutError:
        raise errors.body_too_slow(timeout_s) from None
    return parse_object(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Refuses what JSON does not allow (NaN, lone surrogates, bytes that are not UTF-8) and numbers beyond a double."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise errors.invalid(f"We could not parse the JSON body of your request: {error}") from error
    if not isinstance(value, dict):
        raise errors.invalid("The body of your request must be a JSON object.")
    return value


def _check_media_type(header: str | None) -> None:
    media_type = (header or "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise errors.wrong_media_type(media_type)


async def _read(request: Request, max_bytes: int) -> bytes:
    if _announced_length(request) > max_bytes:
        raise errors.body_too_large(max_bytes)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise errors.body_too_large(max_bytes)
    return bytes(body)


def _announced_length(request: Request) -> int:
    announced = request.headers.get("content-length", "0")
    return int(announced) if announced.isascii() and announced.isdigit() and len(announced) < 20 else 0
