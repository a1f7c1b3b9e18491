"""Several choices of one request: told apart by their index, each with a text, a stop string and an end of its own."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from protocol.curve import ClusterKey
from protocol.messages import Abort, ChoiceEnded, DecodeRequest, FailureCode, FinishReason
from tests.router.conftest import end_token
from tests.router.fake_node import FakeNode, Script, answer_choices, refuse, say_choices, stall
from tests.router.running_router import RunningRouter
from tests.router.streaming import DONE, open_stream

STOP, LENGTH, CANCELLED = FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED
TEXTS = ["Hello wörld 🙂!", "Hi", "Hello you"]
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "n": 3}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "Hi", "n": 3}
BOTH = pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])


def tokens(router: RunningRouter) -> list[list[int]]:
    """The second one ends with the model's end token, which is not shown but counts."""
    first, second, third = map(router.tokenizer.encode, TEXTS)
    return [first, [*second, end_token(router)], third]


def three(router: RunningRouter) -> Script:
    return answer_choices(tokens(router), [LENGTH, STOP, LENGTH])


def texts_of(choices: list[dict[str, Any]]) -> dict[int, str]:
    """Of whole choices or of chunks, joined by index."""
    texts: dict[int, str] = {}
    for choice in choices:
        text = choice.get("text") or choice.get("message", choice.get("delta", {})).get("content") or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


def chunks_of(router: RunningRouter, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    return chunks_in(router.http.post(path, json={**body, "stream": True}, headers=headers))


def chunks_in(answer: httpx.Response) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert data[-1] == DONE and data.count(DONE) == 1
    return [json.loads(one) for one in data[:-1]]


@BOTH
def test_a_body_holds_all_choices_in_order_and_bills_the_prompt_once(
    router: RunningRouter, path: str, body: dict[str, Any]
) -> None:
    node = router.node(three(router))
    said = router.http.post(path, json=body).json()
    assert [choice["index"] for choice in said["choices"]] == [0, 1, 2]
    assert texts_of(said["choices"]) == dict(enumerate(TEXTS))
    assert [choice["finish_reason"] for choice in said["choices"]] == ["length", "stop", "length"]
    completion = sum(map(len, tokens(router)))
    assert said["usage"]["prompt_tokens"] == len(node.requests[0].prompt)
    assert said["usage"]["completion_tokens"] == completion
    assert [request.n for request in node.requests] == [3]


@BOTH
def test_a_stream_interleaves_the_choices_and_ends_each_once(
    router: RunningRouter, path: str, body: dict[str, Any]
) -> None:
    router.node(three(router))
    *chunks, usage = chunks_of(router, path, {**body, "stream_options": {"include_usage": True}})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert texts_of(choices) == dict(enumerate(TEXTS))
    assert [choice["index"] for choice in choices[:3]] == [0, 1, 2]
    ends = [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]
    assert ends == [(0, "length"), (1, "stop"), (2, "length")]
    assert usage["usage"]["completion_tokens"] == sum(map(len, tokens(router)))
    if path == "/v1/chat/completions":
        assert [choice["index"] for choice in choices if "role" in choice["delta"]] == [0, 1, 2]


def test_the_ledger_is_in_the_last_choices_closing_chunk(router: RunningRouter) -> None:
    router.node(three(router))
    chunks = chunks_of(router, "/v1/completions", COMPLETION, **{"X-Kvferry-Ledger": "1"})
    assert ["kvferry" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_without_n_one_choice_is_asked_for(router: RunningRouter, node: FakeNode) -> None:
    for n in (None, 1):
        assert len(router.http.post("/v1/completions", json={**COMPLETION, "n": n}).json()["choices"]) == 1
    assert [request.n for request in node.requests] == [1, 1]


@pytest.mark.parametrize("best_of", [None, 3])
def test_best_of_all_choices_is_all_choices(router: RunningRouter, best_of: int | None) -> None:
    router.node(three(router))
    assert len(router.http.post("/v1/completions", json={**COMPLETION, "best_of": best_of}).json()["choices"]) == 3


def test_the_openai_client_reads_them(router: RunningRouter) -> None:
    router.node(three(router))
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="unused", max_retries=0, timeout=10) as client:
        create = client.chat.completions.create
        whole = create(model="tiny", messages=[{"role": "user", "content": "Hi"}], n=3)
        assert [choice.message.content for choice in whole.choices] == TEXTS
        streamed = ["", "", ""]
        for chunk in create(model="tiny", messages=[{"role": "user", "content": "Hi"}], n=3, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert streamed == TEXTS


# ---- stop strings ----


def aborts(node: FakeNode) -> list[int | None]:
    return [abort.choice for abort in node.of(Abort)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_its_choice_on_the_node_and_no_other(router: RunningRouter, stream: bool) -> None:
    """The others end by themselves; what still comes of the stopped one is neither shown nor counted."""

    def script(node: FakeNode, request: DecodeRequest) -> None:
        say_choices(node, request, [*outputs[:2], []])
        stopped.append(request)

    stopped: list[DecodeRequest] = []
    outputs = [router.tokenizer.encode(text) for text in ("abc", "a.b more of it", "xyz")]
    node = router.node(script)
    body = {**COMPLETION, "stop": ["b m"], "stream": stream}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(router.http.post, "/v1/completions", json=body)
        assert node.wait_for(lambda node: aborts(node) == [1])
        (request,) = stopped
        say_choices(node, request, [[], [], outputs[2]])
        node.say(ChoiceEnded(request=request.request, choice=1, reason=CANCELLED))
        node.say(ChoiceEnded(request=request.request, choice=0, reason=LENGTH))
        node.end(request, STOP)
        said = asked.result(10)
    choices = [choice for chunk in chunks_in(said) for choice in chunk["choices"]] if stream else said.json()["choices"]
    assert texts_of(choices) == {0: "abc", 1: "a.", 2: "xyz"}
    reasons = {choice["index"]: choice["finish_reason"] for choice in choices if choice["finish_reason"]}
    assert reasons == {0: "length", 1: "stop", 2: "stop"}
    if not stream:
        assert said.json()["usage"]["completion_tokens"] == len("abc") + len("a.b m") + len("xyz")
    assert aborts(node) == [1]


def test_when_the_last_choice_meets_a_stop_string_the_request_is_over(router: RunningRouter) -> None:
    outputs = [router.tokenizer.encode(text) for text in ("a;", "abc;", "ab;")]
    node = router.node(lambda node, request: say_choices(node, request, outputs))
    said = router.http.post("/v1/completions", json={**COMPLETION, "stop": ";"}).json()
    assert texts_of(said["choices"]) == {0: "a", 1: "abc", 2: "ab"}
    assert node.wait_for(lambda node: aborts(node) == [0, 2, None])


def test_a_choice_that_the_node_ended_meanwhile_needs_no_stopping(router: RunningRouter) -> None:
    """Its end lies behind its tokens in line: the node no longer knows it."""
    outputs = [router.tokenizer.encode(text) for text in ("a;", "abc")]
    node = router.node(answer_choices(outputs, [LENGTH, LENGTH]))
    said = router.http.post("/v1/completions", json={**COMPLETION, "n": 2, "stop": ";"}).json()
    assert [choice["finish_reason"] for choice in said["choices"]] == ["stop", "length"]
    assert texts_of(said["choices"]) == {0: "a", 1: "abc"}
    assert set(aborts(node)) <= {0}


# ---- ends from outside ----


def test_a_client_that_leaves_ends_all_of_them_at_once(router: RunningRouter) -> None:
    node = router.node(lambda node, request: say_choices(node, request, tokens(router)))
    with open_stream(router, n=3) as events:
        assert events.next_text()
    assert node.wait_for(lambda node: aborts(node) == [None])


@pytest.mark.parametrize("stream", [False, True])
def test_a_node_lost_before_anything_was_shown_costs_only_time(router: RunningRouter, stream: bool) -> None:
    router.node(refuse(FailureCode.NODE_LOST))
    twin = router.node(three(router), running=5)
    if stream:
        choices = [c for chunk in chunks_of(router, "/v1/completions", COMPLETION) for c in chunk["choices"]]
    else:
        choices = router.http.post("/v1/completions", json=COMPLETION).json()["choices"]
    assert texts_of(choices) == dict(enumerate(TEXTS))
    assert len(twin.requests) == 1


def test_a_whole_answer_starts_over_with_all_its_choices(router: RunningRouter) -> None:
    """One of them was complete on the node that is gone."""

    def half(node: FakeNode, request: DecodeRequest) -> None:
        say_choices(node, request, [[50], [51, 52], [53]])
        node.say(ChoiceEnded(request=request.request, choice=1, reason=STOP))
        refuse(FailureCode.NODE_LOST)(node, request)

    router.node(half)
    router.node(three(router), running=5)
    said = router.http.post("/v1/completions", json=COMPLETION).json()
    assert texts_of(said["choices"]) == dict(enumerate(TEXTS))
    assert said["usage"]["completion_tokens"] == sum(map(len, tokens(router)))


def test_once_the_end_of_one_choice_was_shown_nothing_starts_over(router: RunningRouter) -> None:
    """It had no text."""

    def one_ends(node: FakeNode, request: DecodeRequest) -> None:
        say_choices(node, request, [[end_token(router)]])
        node.say(ChoiceEnded(request=request.request, choice=0, reason=STOP))
        refuse(FailureCode.NODE_LOST)(node, request)

    router.node(one_ends)
    twin = router.node(three(router), running=5)
    with open_stream(router, n=3) as events:
        assert json.loads(events.next_data() or "")["choices"][0]["finish_reason"] == "stop"
        (last,) = events.rest()
    assert json.loads(last)["error"]["code"] == "node_lost"
    assert not twin.requests


def test_the_deadline_ends_all_of_them(model_folder: Path, key: ClusterKey) -> None:
    with RunningRouter(model_folder, key, deadline_s=0.3) as router:
        node = router.node(stall)
        assert router.http.post("/v1/completions", json=COMPLETION).status_code == 504
        assert node.wait_for(lambda node: aborts(node) == [None])


# ---- a node that says what cannot be ----


def ends_too_early(node: FakeNode, request: DecodeRequest) -> None:
    say_choices(node, request, [[50], [51], [52]])
    node.end(request, LENGTH)


def speaks_of_a_fourth(node: FakeNode, request: DecodeRequest) -> None:
    say_choices(node, request, [[50], [51], [52], [53]])


def ends_one_twice(node: FakeNode, request: DecodeRequest) -> None:
    for _ in range(2):
        node.say(ChoiceEnded(request=request.request, choice=1, reason=STOP))


def cancels_one_by_itself(node: FakeNode, request: DecodeRequest) -> None:
    node.say(ChoiceEnded(request=request.request, choice=1, reason=CANCELLED))


def leaves_a_gap_in_one(node: FakeNode, request: DecodeRequest) -> None:
    say_choices(node, request, [[50, 51], []])
    say_choices(node, request, [[], [], [52]])
    say_choices(node, request, [[53]])


@pytest.mark.parametrize(
    "script", [ends_too_early, speaks_of_a_fourth, ends_one_twice, cancels_one_by_itself, leaves_a_gap_in_one]
)
def test_on_any_doubt_the_attempt_has_failed(router: RunningRouter, script: Script) -> None:
    router.node(script)
    twin = router.node(three(router), running=5)
    said = router.http.post("/v1/completions", json=COMPLETION).json()
    assert texts_of(said["choices"]) == dict(enumerate(TEXTS))
    assert len(twin.requests) == 1
