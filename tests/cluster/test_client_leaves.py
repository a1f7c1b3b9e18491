"""A client goes away in each phase of its request: pages and slots come back everywhere, and nobody falls."""

from threading import Event

import pytest

from tests.cluster.harness import ProcessCluster
from tests.cluster.invariants import invariants
from tests.cluster.oracle import Oracle
from tests.cluster.waiting import eventually

PROMPT = "the prompt of a client that does not wait for the answer; " * 2
HALF_A_POOL = "x" * 1200
GATE = "xfer:layer=1"
BOTH = ("decode-0", "decode-1")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_during_the_transfer(cluster: ProcessCluster, stream: bool) -> None:
    """P43, MX26: the sender stops, though nothing passes its gate."""
    pids = cluster.pids()
    with cluster.held(GATE, "prefill-0") as gate:
        asked = cluster.ask(PROMPT, 8, stream)
        gate.reached("prefill-0")
        asked.leave()
        cluster.wait_at_rest()
    assert cluster.pids() == pids


def test_between_arrival_and_the_batch(cluster: ProcessCluster) -> None:
    """P09: all KV is there, and no token of it is ever made."""
    pids, tokens = cluster.pids(), tokens_made(cluster)
    with cluster.held("decode:join", "decode-0", "decode-1") as gate:
        asked = cluster.ask(PROMPT, 8)
        gate.reached_first()
        asked.leave()
        cluster.wait_at_rest()
    cluster.wait_at_rest()
    assert (cluster.pids(), tokens_made(cluster)) == (pids, tokens)


def test_in_the_middle_of_a_stream(cluster: ProcessCluster) -> None:
    """MX26: long before the last token."""
    pids, tokens = cluster.pids(), tokens_made(cluster)
    asked = cluster.ask(PROMPT, 1500, stream=True)
    events = asked.events()
    assert [next(events), next(events)]
    asked.leave()
    cluster.wait_at_rest()
    assert cluster.pids() == pids
    assert tokens_made(cluster) - tokens < 1500


def test_while_it_waits_for_pages(cluster: ProcessCluster, oracle: Oracle) -> None:
    """P08: both decode nodes are full with transfers that do not move; a third client's request queues."""
    pids = cluster.pids()
    with cluster.held(GATE, "prefill-0"):
        filling = [cluster.ask(HALF_A_POOL, 4) for _ in range(2)]
        eventually(lambda: running(cluster) == [1.0, 1.0], "each node has one")
        queued = cluster.ask(HALF_A_POOL, 4)
        eventually(lambda: waiting(cluster) == 1, "the third one waits")
        queued.leave()
        eventually(lambda: waiting(cluster) == 0, "it is gone")
    for exchange in filling:
        with exchange:
            assert exchange.text() == oracle.completion(HALF_A_POOL, 4).text
    cluster.wait_at_rest()
    assert cluster.pids() == pids


@pytest.mark.slow
def test_fifty_who_queue_one_after_the_other(cluster: ProcessCluster, oracle: Oracle) -> None:
    """P08: each leaves the queue as it came, and the nodes go on with what they had."""
    with invariants(cluster), cluster.held(GATE, "prefill-0"):
        filling = [cluster.ask(HALF_A_POOL, 4) for _ in range(2)]
        eventually(lambda: running(cluster) == [1.0, 1.0], "each node has one")
        for number in range(50):
            queued = cluster.ask(f"{number} {HALF_A_POOL}", 4)
            eventually(lambda: waiting(cluster) == 1, "another one waits")
            queued.leave()
            eventually(lambda: waiting(cluster) == 0, "it is gone")
    for exchange in filling:
        with exchange:
            assert exchange.text() == oracle.completion(HALF_A_POOL, 4).text


@pytest.mark.slow
@pytest.mark.parametrize("requests", [2, 8])
def test_several_between_arrival_and_the_batch(cluster: ProcessCluster, requests: int) -> None:
    """P09."""
    tokens = tokens_made(cluster)
    with invariants(cluster):
        with cluster.held("decode:join", *BOTH):
            asked = [cluster.ask(PROMPT, 8) for _ in range(requests)]
            eventually(lambda: arrived(cluster) >= requests, "all KV is there")
            for exchange in asked:
                exchange.leave()
            cluster.wait_at_rest()
        cluster.wait_at_rest()
    assert tokens_made(cluster) == tokens


@pytest.mark.slow
def test_at_any_moment_around_the_end_of_the_transfer(cluster: ProcessCluster) -> None:
    """P13: 0 to 20 ms after all KV is there and the prefill node is about to say that it is done."""
    with invariants(cluster):
        for milliseconds in range(21):
            with cluster.held("decode:join", *BOTH) as gate:
                asked = cluster.ask(PROMPT, 200, stream=True)
                gate.reached_first()
            Event().wait(milliseconds / 1000)
            asked.leave()
        cluster.wait_at_rest()
    for name in cluster.nodes:
        assert "Traceback" not in cluster.nodes[name].process.log.read_text()


def arrived(cluster: ProcessCluster) -> float:
    """Requests whose KV is there and which stand before the batch."""
    metrics = [cluster.metrics(name) for name in BOTH]
    return sum(each["requests"] - each["transfers"] for each in metrics)


def running(cluster: ProcessCluster) -> list[float]:
    return [cluster.metrics(name)["requests"] for name in ("decode-0", "decode-1")]


def waiting(cluster: ProcessCluster) -> float:
    return sum(cluster.metrics(name)["requests_waiting"] for name in ("decode-0", "decode-1"))


def tokens_made(cluster: ProcessCluster) -> float:
    return sum(cluster.metrics(name)["requests_tokens_total"] for name in ("decode-0", "decode-1"))
