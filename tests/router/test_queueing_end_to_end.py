"""The line in front of the nodes: bounded, kept alive, with deadlines."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protocol.curve import ClusterKey
from protocol.messages import Failure, FailureCode, FinishReason
from tests.router.conftest import REPLY, end_token
from tests.router.fake_node import FakeNode, answer, stall
from tests.router.running_router import RunningRouter
from tests.router.streaming import COMPLETION, DONE, open_stream

BODY = {"model": "tiny", "prompt": "Hi"}
WAITING = "kvferry_router_requests_waiting"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def let_go(router: RunningRouter, node: FakeNode, nth: int = 0) -> None:
    answer(router.tokenizer.encode(REPLY), end_token(router))(node, node.requests[nth])


def test_requests_beyond_the_nodes_share_wait_their_turn(
    model_folder: Path, key: ClusterKey, pool: ThreadPoolExecutor
) -> None:
    with RunningRouter(model_folder, key, requests_per_node=1) as router:
        node = router.node(stall)
        asked = [pool.submit(router.http.post, "/v1/completions", json=BODY) for _ in range(3)]
        assert router.eventually(lambda: router.metric(WAITING) == 2)
        assert len(node.requests) == 1
        for nth in range(3):
            assert node.was_asked(nth + 1)
            let_go(router, node, nth)
        assert [one.result(10).status_code for one in asked] == [200, 200, 200]


def test_beyond_its_bound_the_line_refuses_at_once(
    model_folder: Path, key: ClusterKey, pool: ThreadPoolExecutor
) -> None:
    with RunningRouter(model_folder, key, requests_per_node=1, queue_limit=1) as router:
        node = router.node(stall)
        asked = [pool.submit(router.http.post, "/v1/completions", json=BODY) for _ in range(2)]
        assert router.eventually(lambda: router.metric(WAITING) == 1)
        refused = router.http.post("/v1/completions", json={**BODY, "stream": True})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert "retry-after" in refused.headers
        for nth in range(2):
            assert node.was_asked(nth + 1)
            let_go(router, node, nth)
        assert [one.result(10).status_code for one in asked] == [200, 200]


def test_a_new_node_serves_those_in_line(model_folder: Path, key: ClusterKey, pool: ThreadPoolExecutor) -> None:
    with RunningRouter(model_folder, key, requests_per_node=1) as router:
        first = router.node(stall)
        asked = [pool.submit(router.http.post, "/v1/completions", json=BODY) for _ in range(2)]
        assert router.eventually(lambda: router.metric(WAITING) == 1)
        second = router.node(stall)
        assert second.was_asked()
        let_go(router, first)
        let_go(router, second)
        assert [one.result(10).status_code for one in asked] == [200, 200]


def test_a_request_whose_node_died_waits_in_line_where_the_others_are_full(
    model_folder: Path, key: ClusterKey, pool: ThreadPoolExecutor
) -> None:
    with RunningRouter(model_folder, key, requests_per_node=1) as router:
        dying, busy = router.node(stall), router.node(stall)
        asked = [pool.submit(router.http.post, "/v1/completions", json=BODY) for _ in range(2)]
        assert dying.was_asked() and busy.was_asked()
        dying.close()
        assert router.eventually(lambda: router.metric(WAITING) == 1)
        let_go(router, busy)
        assert busy.was_asked(2)
        let_go(router, busy, 1)
        assert [one.result(10).status_code for one in asked] == [200, 200]


def test_when_the_last_node_goes_those_in_line_are_told(
    model_folder: Path, key: ClusterKey, pool: ThreadPoolExecutor
) -> None:
    with RunningRouter(model_folder, key, requests_per_node=1) as router:
        node = router.node(stall)
        asked = [pool.submit(router.http.post, "/v1/completions", json=BODY) for _ in range(2)]
        assert router.eventually(lambda: router.metric(WAITING) == 1)
        node.announce(ready=False)
        assert router.eventually(lambda: router.metric(WAITING) == 0)
        let_go(router, node)
        assert sorted(one.result(10).status_code for one in asked) == [200, 503]


def test_a_stream_that_waits_is_kept_alive(model_folder: Path, key: ClusterKey) -> None:
    with RunningRouter(model_folder, key, keep_alive_s=0.05) as router:
        node = router.node(stall)
        with open_stream(router) as events:
            assert events.next_comment() and events.next_comment()
            let_go(router, node)
            assert events.rest()[-1] == DONE


def test_after_a_keep_alive_a_failure_is_an_event(model_folder: Path, key: ClusterKey) -> None:
    with RunningRouter(model_folder, key, keep_alive_s=0.05) as router:
        node = router.node(stall)
        with open_stream(router) as events:
            assert events.response.status_code == 200 and events.next_comment()
            node.end(node.requests[0], FinishReason.ERROR, Failure(FailureCode.CAPACITY, "outgrew the cache"))
            rest = events.rest()
        assert len(rest) == 1 and "outgrew the cache" in rest[0]


@pytest.mark.parametrize("stream", [False, True])
def test_the_deadline_ends_a_request_on_its_node(model_folder: Path, key: ClusterKey, stream: bool) -> None:
    with RunningRouter(model_folder, key, deadline_s=0.3) as router:
        node = router.node(stall)
        response = router.http.post("/v1/completions", json={**COMPLETION, "stream": stream})
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        assert node.was_aborted(node.requests[0].request)
        assert 0 < node.requests[0].deadline_s <= 0.3


def test_the_deadline_holds_in_line_too(model_folder: Path, key: ClusterKey, pool: ThreadPoolExecutor) -> None:
    with RunningRouter(model_folder, key, requests_per_node=1, deadline_s=0.5) as router:
        router.node(stall)
        asked = [pool.submit(router.http.post, "/v1/completions", json=BODY) for _ in range(2)]
        assert [one.result(10).status_code for one in asked] == [504, 504]
        assert router.eventually(lambda: router.metric(WAITING) == 0)
