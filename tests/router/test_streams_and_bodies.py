"""Slow bodies, readers that do not read, and arbitrary JSON: bounded and never our bug."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from router.openai.chat import parse_chat
from router.openai.completions import parse_completion
from router.openai.errors import ApiError
from router.openai.json_body import read_object
from router.openai.sse import EventStream

FIELDS = ["model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop"]
FIELDS += ["stream", "stream_options", "n", "logprobs", "tools", "response_format", "logit_bias", "ignore_eos", "user"]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type"]), inner),
    max_leaves=6,
)


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_any_json_object_is_a_request_or_a_client_error(body: dict[str, Any]) -> None:
    for parse in (parse_chat, parse_completion):
        try:
            parse({"model": "m", **body})
        except ApiError as error:
            assert error.status == 400 and error.message


def test_a_body_that_does_not_come_is_given_up() -> None:
    request = Request({"type": "http", "method": "POST", "headers": []}, never)
    with pytest.raises(ApiError) as refused:
        asyncio.run(read_object(request, max_bytes=10, timeout_s=0.01))
    assert refused.value.status == 408


def test_a_client_that_does_not_read_its_stream_is_given_up() -> None:
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            closed.set()

    async def full(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def work() -> None:
        source = events()
        stream = EventStream(await anext(source), source, limit_s=0.01)
        async with asyncio.timeout(5):
            await stream({"type": "http"}, never, full)
        assert closed.is_set()

    asyncio.run(work())
