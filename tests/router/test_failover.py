"""Nodes that refuse, die or fall silent: one retry while nothing was shown, else one clear error."""

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from protocol.ledger import Ledger
from protocol.messages import (
    DecodeRequest,
    Failure,
    FailureCode,
    FinishReason,
    Nack,
    RequestEnded,
    TokenDelta,
)
from tests.router.conftest import REPLY, end_token
from tests.router.fake_node import FakeNode, answer, refuse, stall, tokens_then_nothing
from tests.router.running_router import RunningRouter
from tests.router.streaming import DONE, open_stream

BODY = {"model": "tiny", "prompt": "Hi"}
LOST = "kvferry_router_nodes_lost_total"
RETRIES = "kvferry_router_retries_total"
DEADLINE_S = 10.0

Ask = Callable[[], "Future[httpx.Response]"]


@pytest.fixture
def ask(router: RunningRouter) -> Iterator[Ask]:
    """Starts a whole-answer request and leaves it running."""
    with ThreadPoolExecutor(4) as pool:
        yield lambda: pool.submit(router.http.post, "/v1/completions", json=BODY)


def answering_node(router: RunningRouter) -> FakeNode:
    """The router's second choice: it says that it is busy."""
    return router.node(answer(router.tokenizer.encode(REPLY), end_token(router)), running=5)


def restart(router: RunningRouter, node: FakeNode) -> FakeNode:
    """The node dies and a new process takes its address: known at once, without waiting for silence."""
    node.close()
    return router.node(stall, status_address=node.status.status_address, running=9)


def logged(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    """The fields of each such event."""
    return [vars(record)["fields"] for record in caplog.records if record.getMessage() == name]


def say_hello(router: RunningRouter) -> list[int]:
    return router.tokenizer.encode("Hello")


def test_a_node_lost_before_the_first_token_costs_only_time(router: RunningRouter, ask: Ask) -> None:
    dying, twin = router.node(stall), answering_node(router)
    asked = ask()
    assert dying.was_asked()
    restart(router, dying)
    assert asked.result(DEADLINE_S).json()["choices"][0]["text"] == REPLY
    assert twin.requests[0].request == dying.requests[0].request
    assert router.metric(RETRIES) == 1


def test_a_whole_answer_survives_a_node_lost_after_some_tokens(router: RunningRouter, ask: Ask) -> None:
    dying = router.node(tokens_then_nothing(say_hello(router)))
    answering_node(router)
    asked = ask()
    assert router.eventually(lambda: router.metric("kvferry_router_tokens_total") > 0)
    restart(router, dying)
    answered = asked.result(DEADLINE_S).json()
    assert answered["choices"][0]["text"] == REPLY
    assert answered["usage"]["completion_tokens"] == len(router.tokenizer.encode(REPLY)) + 1


def test_a_stream_cut_after_text_was_shown_ends_with_one_error_and_no_done(router: RunningRouter) -> None:
    dying, twin = router.node(tokens_then_nothing(say_hello(router))), answering_node(router)
    with open_stream(router) as events:
        assert "Hello".startswith(events.next_text())
        restart(router, dying)
        rest = events.rest()
    assert DONE not in rest
    assert json.loads(rest[-1])["error"]["code"] == "node_lost"
    assert sum("error" in data for data in rest) == 1
    assert not twin.requests
    assert router.metric("kvferry_router_requests_ended_total", '{outcome="cut"}') == 1


def test_a_stream_that_showed_nothing_yet_goes_on_elsewhere(router: RunningRouter) -> None:
    """Half a character was received, none shown."""
    half = router.tokenizer.encode("🙂")[:2]
    dying, twin = router.node(tokens_then_nothing(half)), answering_node(router)
    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(router.http.post, "/v1/completions", json={**BODY, "stream": True})
        assert router.eventually(lambda: router.metric("kvferry_router_tokens_total") == 2)
        restart(router, dying)
        lines = streaming.result(DEADLINE_S).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == DONE
    assert "".join(json.loads(one)["choices"][0]["text"] for one in data[:-1]) == REPLY
    assert twin.requests


def test_a_silent_node_is_lost_after_its_missed_heartbeats(
    router: RunningRouter, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    silent, _ = router.node(stall), answering_node(router)
    asked = ask()
    assert silent.was_asked()
    silent.close()
    assert asked.result(DEADLINE_S).json()["choices"][0]["text"] == REPLY
    assert silent.status.name not in router.members()
    assert router.metric(LOST) == 1
    (said,) = logged(caplog, "node lost")
    assert (said["node"], said["reason"]) == (silent.status.name, "silent")


def test_a_node_that_was_draining_has_left_when_it_falls_silent(
    router: RunningRouter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    leaving = router.node(stall)
    leaving.announce(draining=True)
    assert router.eventually(lambda: not router.members()[leaving.status.name]["ready"])
    leaving.close()
    assert router.eventually(lambda: not router.members())
    (said,) = logged(caplog, "node left")
    assert said["node"] == leaving.status.name and not logged(caplog, "node lost") and router.metric(LOST) == 0


@pytest.mark.parametrize(
    "code", [FailureCode.OVERLOADED, FailureCode.DRAINING, FailureCode.INCOMPATIBLE, FailureCode.TRANSFER_FAILED]
)
def test_what_one_node_refuses_another_serves(router: RunningRouter, code: FailureCode) -> None:
    refusing = router.node(refuse(code))
    answering_node(router)
    assert router.http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == REPLY
    assert len(refusing.requests) == 1


def test_there_is_no_third_attempt(router: RunningRouter) -> None:
    nodes = [router.node(refuse(FailureCode.TRANSFER_FAILED)) for _ in range(3)]
    assert router.http.post("/v1/completions", json=BODY).status_code == 502
    assert sum(len(node.requests) for node in nodes) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("code", "status"), [(FailureCode.TOO_LONG, 400), (FailureCode.NO_PREFILL, 503)])
def test_a_nodes_failure_becomes_one_http_error(
    router: RunningRouter, code: FailureCode, status: int, stream: bool
) -> None:
    node = router.node(refuse(code, "because of the script"))
    response = router.http.post("/v1/completions", json={**BODY, "stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["message"] == "because of the script"
    assert ("retry-after" in response.headers) == (status == 503)
    assert len(node.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_without_nodes_the_answer_is_503_at_once_and_service_resumes(router: RunningRouter, stream: bool) -> None:
    response = router.http.post("/v1/completions", json={**BODY, "stream": stream})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_capacity"
    assert int(response.headers["retry-after"]) > 0
    assert router.http.get("/ready").status_code == 503
    assert router.http.get("/health").status_code == 200
    answering_node(router)
    assert router.http.get("/ready").status_code == 200
    assert router.http.post("/v1/completions", json={**BODY, "stream": stream}).status_code == 200


def test_a_gap_in_the_tokens_fails_the_attempt_rather_than_the_text(router: RunningRouter) -> None:
    def skip_one(node: FakeNode, request: DecodeRequest) -> None:
        node.say(TokenDelta(request=request.request, index=0, tokens=[50]))
        node.say(TokenDelta(request=request.request, index=2, tokens=[52]))
        node.end(request, FinishReason.LENGTH)

    node = router.node(skip_one)
    assert router.http.post("/v1/completions", json=BODY).status_code == 500
    assert node.was_asked()


def test_a_last_token_that_got_lost_fails_the_attempt_rather_than_the_text(router: RunningRouter) -> None:
    """A link that broke in between may have lost any message but the last."""

    def lose_one(node: FakeNode, request: DecodeRequest) -> None:
        node.say(TokenDelta(request=request.request, index=0, tokens=[50]))
        ledger = Ledger(decode_node="decode")
        node.say(
            RequestEnded(request=request.request, reason=FinishReason.LENGTH, tokens=2, failure=None, ledger=ledger)
        )

    node = router.node(lose_one)
    response = router.http.post("/v1/completions", json=BODY)
    assert response.status_code == 500 and "1 of 2 tokens came" in response.json()["error"]["message"]
    assert node.was_asked()


def test_a_node_that_gives_up_by_itself_counts_as_lost(router: RunningRouter) -> None:
    router.node(lambda node, request: node.end(request, FinishReason.CANCELLED))
    answering_node(router)
    assert router.http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == REPLY


def no_handler(node: FakeNode, request: DecodeRequest) -> None:
    node.say(Nack(failure=Failure(FailureCode.UNSUPPORTED, "what is that?")))


def test_a_node_that_does_not_know_what_it_was_sent_is_not_waited_for(router: RunningRouter, ask: Ask) -> None:
    """P25: its Nack names no request, so those that it has said nothing of go elsewhere."""
    router.node(no_handler)
    twin = answering_node(router)
    assert ask().result(DEADLINE_S).json()["choices"][0]["text"] == REPLY
    assert len(twin.requests) == 1 and router.metric(RETRIES) == 1


def test_where_no_node_knows_what_it_was_sent_the_client_gets_503(router: RunningRouter, ask: Ask) -> None:
    router.node(no_handler)
    refused = ask().result(DEADLINE_S)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_capacity")
