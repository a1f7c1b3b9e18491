"""A router that stops: once its grace is over, every open answer ends with one error that says so."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protocol.curve import ClusterKey
from tests.router.fake_node import stall, tokens_then_nothing
from tests.router.running_router import RunningRouter
from tests.router.streaming import COMPLETION, open_stream

WAITING = "kvferry_router_requests_waiting"
WHOLE = {**COMPLETION, "stream": False}
DEADLINE_S = 10.0


@pytest.fixture
def router(model_folder: Path, key: ClusterKey) -> Iterator[RunningRouter]:
    with RunningRouter(model_folder, key, grace_s=0.2, requests_per_node=1) as running:
        yield running


def test_after_the_grace_an_open_stream_ends_with_one_error_and_its_node_is_told(router: RunningRouter) -> None:
    node = router.node(tokens_then_nothing(router.tokenizer.encode("a")))
    with open_stream(router) as events:
        assert events.next_text() == "a"
        router.stop()
        rest = events.rest()
    assert [json.loads(data)["error"]["code"] for data in rest] == ["draining"]
    assert node.was_aborted(node.requests[0].request)


def test_after_the_grace_nothing_is_tried_elsewhere(router: RunningRouter) -> None:
    node, twin = router.node(stall), router.node(stall, running=5)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(router.http.post, "/v1/completions", json=WHOLE)
        assert node.was_asked()
        router.stop()
        refused = asked.result(DEADLINE_S)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert not twin.requests


def test_after_the_grace_nobody_waits_in_line(router: RunningRouter) -> None:
    node = router.node(stall)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(router.http.post, "/v1/completions", json=WHOLE) for _ in range(2)]
        assert node.was_asked() and router.eventually(lambda: router.metric(WAITING) == 1)
        router.stop()
        refused = [one.result(DEADLINE_S) for one in asked]
    assert [(one.status_code, one.json()["error"]["code"]) for one in refused] == [(503, "draining")] * 2
    assert len(node.requests) == 1
