"""A handful of malformed inputs against the whole system: each its error, then a valid request, the same processes."""

import json
from typing import Any

import pytest

from tests.cluster.harness import BLOCKS, MODEL, PAGE, ProcessCluster
from tests.cluster.oracle import Oracle

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}
VALID: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 4, "temperature": 0}
TOO_LONG = "x" * (BLOCKS * PAGE)

CASES: dict[str, tuple[str, Any, int, str | None, str | None]] = {
    "M01": (CHAT, b'{"model":', 400, None, None),
    "M02": (CHAT, b"", 400, None, None),
    "M04": (CHAT, [], 400, None, None),
    "M05": (CHAT, b"\xff\xfe\x00", 400, None, None),
    "M07": (CHAT, {**VALID, "model": "other"}, 404, "model", "model_not_found"),
    "M09": (CHAT, {**VALID, "messages": []}, 400, "messages", "empty_array"),
    "M13": (COMPLETIONS, {"model": MODEL, "prompt": ""}, 400, "prompt", None),
    "M14 chat": (
        CHAT,
        {**VALID, "messages": [{"role": "user", "content": TOO_LONG}]},
        400,
        "messages",
        "context_length_exceeded",
    ),
    "M14": (COMPLETIONS, {"model": MODEL, "prompt": TOO_LONG}, 400, "prompt", "context_length_exceeded"),
    "M15": (CHAT, {**VALID, "max_tokens": BLOCKS * PAGE}, 400, "messages", "context_length_exceeded"),
    "M17": (CHAT, {**VALID, "max_tokens": -1}, 400, "max_tokens", "integer_below_min_value"),
    "M19": (CHAT, {**VALID, "temperature": 2.5}, 400, "temperature", "decimal_above_max_value"),
    "token ids": (COMPLETIONS, {"model": MODEL, "prompt": [1 << 40]}, 400, "prompt", "integer_above_max_value"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", CASES)
def test_malformed_input_gets_its_error_and_the_next_request_succeeds(
    unharmed: ProcessCluster, oracle: Oracle, case: str, stream: bool
) -> None:
    path, body, status, param, code = CASES[case]
    if isinstance(body, dict):
        body = {**body, "stream": stream}
    pids = unharmed.pids()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with unharmed.send(path, content, {}) as refused:
        assert refused.status == status
        error = refused.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    with unharmed.send(CHAT, json.dumps(VALID).encode(), {}) as asked:
        answer = asked.json()["choices"][0]["message"]["content"]
    assert answer == oracle.chat([USER], 4).text
    assert unharmed.pids() == pids
