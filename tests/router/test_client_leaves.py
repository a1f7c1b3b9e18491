"""A client that goes away, at any moment, ends its request on the node."""

import socket
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from protocol.curve import ClusterKey
from protocol.messages import Abort, TokenDelta
from tests.router.fake_node import FakeNode, stall, tokens_then_nothing
from tests.router.running_router import RunningRouter
from tests.router.streaming import COMPLETION, open_stream

CANCELLED = ("kvferry_router_requests_ended_total", '{outcome="cancelled"}')


class RawClient:
    """Posts a completion over a bare socket, and can leave before any answer."""

    def __init__(self, router: RunningRouter, stream: bool) -> None:
        address = urlsplit(router.url)
        body = msgspec.json.encode({**COMPLETION, "stream": stream})
        self._socket = socket.create_connection((address.hostname, address.port or 0), timeout=10)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        self._socket.sendall(head.encode() + b"\r\n\r\n" + body)

    def leave(self) -> None:
        self._socket.close()


def only_request(node: FakeNode) -> str:
    assert node.was_asked()
    return node.requests[0].request


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token(router: RunningRouter, stream: bool) -> None:
    node = router.node(stall)
    client = RawClient(router, stream)
    request = only_request(node)
    client.leave()
    assert node.was_aborted(request)
    assert router.eventually(lambda: router.metric(*CANCELLED) == 1)


def test_tokens_that_cross_the_abort_are_no_second_one(router: RunningRouter) -> None:
    node = router.node(stall)
    client = RawClient(router, stream=False)
    request = only_request(node)
    client.leave()
    assert node.was_aborted(request)
    for index in range(3):
        node.say(TokenDelta(request=request, index=index, tokens=[50]))
    assert node.wait_for(lambda node: len(node.of(Abort)) == 4), "the node is told again"
    assert router.metric("kvferry_router_aborts_total") == 1


def test_in_the_middle_of_a_stream(router: RunningRouter) -> None:
    node = router.node(tokens_then_nothing(router.tokenizer.encode("Hello you")))
    with open_stream(router) as events:
        assert events.next_text()
    assert node.was_aborted(only_request(node))
    assert router.eventually(lambda: router.metric(*CANCELLED) == 1)


def test_in_the_middle_of_a_whole_answer(router: RunningRouter) -> None:
    node = router.node(tokens_then_nothing(router.tokenizer.encode("Hello you")))
    client = RawClient(router, stream=False)
    request = only_request(node)
    assert router.eventually(lambda: router.metric("kvferry_router_tokens_total") > 0)
    client.leave()
    assert node.was_aborted(request)


def test_while_it_waits_in_line_no_node_hears_of_it(model_folder: Path, key: ClusterKey) -> None:
    with RunningRouter(model_folder, key, requests_per_node=1) as router:
        node = router.node(stall)
        first = RawClient(router, stream=False)
        assert node.was_asked()
        second = RawClient(router, stream=True)
        assert router.eventually(lambda: router.metric("kvferry_router_requests_waiting") == 1)
        second.leave()
        assert router.eventually(lambda: router.metric("kvferry_router_requests_waiting") == 0)
        first.leave()
        assert node.was_aborted(only_request(node))
        assert router.eventually(lambda: router.metric(*CANCELLED) == 2)
        assert len(node.requests) == 1


def test_the_books_balance_after_many_came_and_went(router: RunningRouter) -> None:
    router.node(tokens_then_nothing(router.tokenizer.encode("Hello")))
    for _ in range(20):
        with open_stream(router) as events:
            events.next_text()
    assert router.eventually(lambda: router.metric("kvferry_router_requests_running") == 0)
    assert router.metric("kvferry_router_requests_started_total") == router.metric(*CANCELLED) == 20
    assert router.eventually(lambda: all(member["in_flight"] == 0 for member in router.members().values()))
