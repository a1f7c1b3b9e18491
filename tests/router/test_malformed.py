"""Malformed inputs M01-M22 and M24: each its exact error, plain and as a stream, and the next request succeeds."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from protocol.curve import ClusterKey
from tests.router.conftest import REPLY, end_token
from tests.router.fake_node import answer
from tests.router.model_folder import MAX_CONTEXT
from tests.router.running_router import RunningRouter

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
VALID: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
VALID_COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "Hi"}
JSON = "application/json"
LONG = "a b c d e f " * MAX_CONTEXT


@dataclass(frozen=True)
class Case:
    """`body`: bytes as they are, or a JSON value (to which "stream" can be added)."""

    name: str
    body: Any
    status: int = 400
    param: str | None = None
    code: str | None = None
    path: str = CHAT
    media_type: str = JSON
    method: str = "POST"

    def content(self, stream: bool) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        as_stream = stream and isinstance(self.body, dict)
        return msgspec.json.encode({**self.body, "stream": True} if as_stream else self.body)


def chat(name: str, param: str | None, code: str | None, status: int = 400, **fields: Any) -> Case:
    return Case(name, {**VALID, **fields}, status, param, code)


def without(name: str, field: str) -> Case:
    body = {key: value for key, value in VALID.items() if key != field}
    return Case(name, body, param=field, code="missing_required_parameter")


def completion(name: str, prompt: Any, param: str = "prompt", code: str | None = None, **fields: Any) -> Case:
    return Case(name, {**VALID_COMPLETION, "prompt": prompt, **fields}, 400, param, code, COMPLETIONS)


def message(name: str, param: str, code: str, value: Any) -> Case:
    return chat(name, param, code, messages=[value])


BELOW, ABOVE, TYPE, LATER = "integer_below_min_value", "integer_above_max_value", "invalid_type", "unsupported_value"

NO_OBJECTS: list[Any] = [[], 3, "x", None]
NO_PROMPTS: list[Any] = ["", [], [""], [[]]]
NO_INTEGERS: list[Any] = [1.5, "10", True, [], {}]
CASES = [
    Case("M01", b'{"model":'),
    Case("M02", b""),
    Case("M03", VALID, 415, media_type="text/plain"),
    Case("M03 form", b"model=tiny", 415, media_type="application/x-www-form-urlencoded"),
    *(Case(f"M04 {value!r}", value) for value in NO_OBJECTS),
    Case("M05", b"\xff\xfe\x00"),
    Case("M05 in a string", b'{"model":"tiny","messages":[{"role":"user","content":"\xff"}]}'),
    without("M06", "model"),
    chat("M06 null", "model", "missing_required_parameter", model=None),
    chat("M06 number", "model", TYPE, model=3),
    chat("M07", "model", "model_not_found", 404, model="other"),
    without("M08", "messages"),
    chat("M09", "messages", "empty_array", messages=[]),
    chat("M10", "messages", TYPE, messages="hi"),
    chat("M10 object", "messages", TYPE, messages={}),
    message("M11", "messages[0].role", "invalid_value", {"role": "wizard", "content": "Hi"}),
    message("M11 none", "messages[0].role", "missing_required_parameter", {"content": "Hi"}),
    message("M11 list", "messages[0].role", TYPE, {"role": ["user"], "content": "Hi"}),
    message("M11 tool", "messages[0].role", LATER, {"role": "tool", "content": "Hi"}),
    message("M12", "messages[0].content", TYPE, {"role": "user", "content": None}),
    message("M12 absent", "messages[0].content", TYPE, {"role": "user"}),
    message("M12 empty", "messages[0].content", "empty_array", {"role": "user", "content": []}),
    message(
        "M12 image",
        "messages[0].content[0].type",
        LATER,
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    ),
    message("M12 string part", "messages[0].content[0]", TYPE, {"role": "user", "content": ["Hi"]}),
    *(completion(f"M13 {prompt!r}", prompt) for prompt in NO_PROMPTS),
    completion("M13 bool", [True], code=TYPE),
    completion("M13 mixed", [1, "a"], code=TYPE),
    completion("M13 negative", [-1], code=BELOW),
    completion("M13 huge", [10**30], code=ABOVE),
    completion("M13 beyond the vocabulary", [100_000], code=ABOVE),
    completion("M13 two", ["a", "b"], code=LATER),
    completion("M13 object", {}, code=TYPE),
    message("M14", "messages", "context_length_exceeded", {"role": "user", "content": LONG}),
    completion("M14 completion", LONG, code="context_length_exceeded"),
    completion("M14 exactly full", [5] * MAX_CONTEXT, code="context_length_exceeded"),
    chat("M15", "messages", "context_length_exceeded", max_tokens=MAX_CONTEXT),
    completion("M15 completion", [5] * 10, code="context_length_exceeded", max_tokens=MAX_CONTEXT - 9),
    chat("M16", "max_tokens", BELOW, max_tokens=0),
    chat("M17 -1", "max_tokens", BELOW, max_tokens=-1),
    *(chat(f"M17 {value!r}", "max_tokens", TYPE, max_tokens=value) for value in NO_INTEGERS),
    chat("M17 max_completion_tokens", "max_completion_tokens", BELOW, max_completion_tokens=0),
    chat("M18", "max_tokens", None, max_tokens=1_000_000_000),
    chat("M18 vast", "max_tokens", None, max_tokens=10**400),
    chat("M19 2.5", "temperature", "decimal_above_max_value", temperature=2.5),
    chat("M19 -0.1", "temperature", "decimal_below_min_value", temperature=-0.1),
    chat("M19 10**400", "temperature", "decimal_above_max_value", temperature=10**400),
    chat("M19 bool", "temperature", TYPE, temperature=True),
    chat("M19 1.5", "top_p", "decimal_above_max_value", top_p=1.5),
    chat("M19 -1", "top_p", "decimal_below_min_value", top_p=-1),
    chat("M20 0", "n", BELOW, n=0),
    chat("M20 129", "n", ABOVE, n=129),
    chat("M21", "stop", "array_above_max_length", stop=["a", "b", "c", "d", "e"]),
    chat("M21 empty", "stop", "invalid_value", stop=[""]),
    chat("M21 number", "stop", TYPE, stop=[1]),
    chat("M21 long", "stop", "string_above_max_length", stop="x" * 1000),
    Case(
        "stream is a string",
        b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"stream":"yes"}',
        400,
        "stream",
        TYPE,
    ),
    chat("options are a list", "stream_options", TYPE, stream=True, stream_options=[]),
    chat("seed", "seed", TYPE, seed="7"),
    chat("seed beyond 64 bits", "seed", ABOVE, seed=1 << 63),
    chat("template refuses", "messages", None, messages=[{"role": "user", "content": "REFUSE"}]),
    chat("unknown field", "best_of", "unknown_parameter", best_of=5),
    chat("n text", "n", TYPE, n="2"),
    chat("n vast", "n", ABOVE, n=10**30),
    chat("logprobs", "logprobs", LATER, logprobs=True),
    chat("tools", "tools", LATER, tools=[{"type": "function", "function": {"name": "f"}}]),
    chat("tool_choice", "tool_choice", LATER, tool_choice="required"),
    chat("response_format", "response_format", LATER, response_format={"type": "json_object"}),
    chat("logprobs 1", "logprobs", LATER, logprobs=1),
    chat("top_k", "top_k", BELOW, top_k=-2),
    chat("top_k fraction", "top_k", TYPE, top_k=2.5),
    chat("min_p", "min_p", "decimal_above_max_value", min_p=1.5),
    chat("repetition_penalty", "repetition_penalty", "decimal_below_min_value", repetition_penalty=0),
    chat("presence_penalty", "presence_penalty", "decimal_below_min_value", presence_penalty=-2.1),
    chat("min_tokens", "min_tokens", BELOW, min_tokens=-1),
    chat("min_tokens above max_tokens", "min_tokens", "invalid_value", min_tokens=6, max_tokens=5),
    chat("stop_token_ids", "stop_token_ids", TYPE, stop_token_ids=5),
    chat("stop_token_ids string", "stop_token_ids", TYPE, stop_token_ids=["5"]),
    chat("stop_token_ids negative", "stop_token_ids", BELOW, stop_token_ids=[-1]),
    chat("stop_token_ids beyond", "stop_token_ids", ABOVE, stop_token_ids=[100_000]),
    chat("stop_token_ids many", "stop_token_ids", "array_above_max_length", stop_token_ids=[5] * 129),
    chat("logit_bias list", "logit_bias", TYPE, logit_bias=[5]),
    chat("logit_bias key", "logit_bias", "invalid_value", logit_bias={"-5": 1}),
    chat("logit_bias word", "logit_bias", "invalid_value", logit_bias={"the": 1}),
    chat("logit_bias value", "logit_bias", "decimal_above_max_value", logit_bias={"5": 101}),
    chat("logit_bias null", "logit_bias", TYPE, logit_bias={"5": None}),
    chat("logit_bias beyond", "logit_bias", ABOVE, logit_bias={"9999999999": 1}),
    chat("logit_bias many", "logit_bias", "object_above_max_properties", logit_bias={str(i): 1 for i in range(1025)}),
    chat("frequency_penalty range", "frequency_penalty", "decimal_above_max_value", frequency_penalty=3),
    message("tool calls", "messages[0].tool_calls", LATER, {"role": "assistant", "content": "", "tool_calls": [{}]}),
    completion("best_of", "Hi", "best_of", LATER, best_of=2),
    completion("best_of below n", "Hi", "best_of", LATER, best_of=1, n=2),
    completion("suffix", "Hi", "suffix", LATER, suffix="x"),
    completion("echo", "Hi", "echo", LATER, echo=True),
    Case("NaN", b'{"model":"tiny","messages":[{"role":"user","content":"Hi"}],"temperature":NaN}'),
    Case("1e999", b'{"model":"tiny","messages":[{"role":"user","content":"Hi"}],"temperature":1e999}'),
    Case("many digits", b'{"model":"tiny","max_tokens":' + b"9" * 5000 + b"}"),
    Case("lone surrogate", b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800 and on"}]}'),
    Case("deep nesting", b"[" * 100_000),
    Case("deep nesting in a field", b'{"model":' + b'{"a":' * 50_000),
    Case("trailing text", b'{"model":"tiny"} x'),
    Case("M24 path", VALID, 404, path="/v1/unknown"),
    Case("M24 slash", VALID, 404, path=CHAT + "/"),
    *(
        Case(f"M24 {method} {path}", b"", 405, code="method_not_supported", path=path, method=method)
        for method in ("GET", "DELETE")
        for path in (CHAT, COMPLETIONS)
    ),
    Case("POST on models", VALID, 405, code="method_not_supported", path="/v1/models"),
]


@pytest.fixture(scope="module")
def served(model_folder: Path, key: ClusterKey) -> Iterator[RunningRouter]:
    with RunningRouter(model_folder, key) as router:
        router.node(answer(router.tokenizer.encode(REPLY), end_token(router)))
        yield router


def assert_error(response: httpx.Response, status: int, param: str | None, code: str | None) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == JSON
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    error = body["error"]
    assert isinstance(error["message"], str) and error["message"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_malformed_input_gets_its_error_and_the_next_request_succeeds(
    served: RunningRouter, case: Case, stream: bool
) -> None:
    headers = {"Content-Type": case.media_type}
    response = served.http.request(case.method, case.path, content=case.content(stream), headers=headers)
    assert_error(response, case.status, case.param, case.code)
    after = served.http.post(CHAT, json=VALID)
    assert after.status_code == 200 and after.json()["choices"][0]["message"]["content"] == REPLY


@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"stream": None}])
def test_m22_stream_options_need_a_stream(served: RunningRouter, fields: dict[str, Any]) -> None:
    body = {**VALID, **fields, "stream_options": {"include_usage": True}}
    assert_error(served.http.post(CHAT, json=body), 400, "stream_options", None)


def test_a_body_that_announces_too_much_is_refused(served: RunningRouter) -> None:
    body = {**VALID, "user": "x" * (5 << 20)}
    assert_error(served.http.post(CHAT, json=body), 413, None, "request_too_large")


def test_a_body_that_grows_too_large_unannounced_is_refused(served: RunningRouter) -> None:
    parts = (b"x" * (1 << 20) for _ in range(6))
    response = served.http.post(CHAT, content=parts, headers={"Content-Type": JSON})
    assert_error(response, 413, None, "request_too_large")


def test_of_a_repeated_key_the_last_counts(served: RunningRouter) -> None:
    content = b'{"model":"other","model":"tiny","messages":[{"role":"user","content":"Hi"}]}'
    assert served.http.post(CHAT, content=content, headers={"Content-Type": JSON}).status_code == 200


def test_harmless_fields_are_taken(served: RunningRouter) -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "n": 1,
        "logprobs": False,
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "presence_penalty": 0,
        "logit_bias": {},
        "stop": None,
        "max_completion_tokens": 5,
    }
    assert served.http.post(CHAT, json={**VALID, **harmless}).status_code == 200


def test_client_mistakes_are_counted_apart_from_failures(served: RunningRouter) -> None:
    before = served.metric("kvferry_router_requests_started_total")
    refused = served.metric("kvferry_router_requests_refused_total", '{status="400"}')
    served.http.post(CHAT, content=b"{", headers={"Content-Type": JSON})
    assert served.metric("kvferry_router_requests_started_total") == before
    assert served.metric("kvferry_router_requests_refused_total", '{status="400"}') == refused + 1


@pytest.fixture(scope="module")
def locked(model_folder: Path, key: ClusterKey) -> Iterator[RunningRouter]:
    with RunningRouter(model_folder, key, api_keys=(b"sk-one", b"sk-two")) as router:
        router.node(answer(router.tokenizer.encode(REPLY), end_token(router)))
        yield router


@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        (None, None),
        ("Basic abc", None),
        ("Bearer", None),
        ("Bearer wrong", "invalid_api_key"),
        ("Bearer é", "invalid_api_key"),
    ],
)
def test_m23_without_the_key_nothing_is_served(
    locked: RunningRouter, authorization: str | None, code: str | None
) -> None:
    headers = httpx.Headers({} if authorization is None else {b"authorization": authorization.encode()})
    assert_error(locked.http.post(CHAT, json=VALID, headers=headers), 401, None, code)
    assert_error(locked.http.get("/v1/models", headers=headers), 401, None, code)
    assert locked.http.get("/health").status_code == 200
    right = {"Authorization": "Bearer sk-two"}
    assert locked.http.post(CHAT, json=VALID, headers=right).status_code == 200
