"""A client goes away in each phase of its request: pages and slots come back everywhere, and nobody falls."""

import pytest

from tests.cluster.harness import ProcessCluster
from tests.cluster.oracle import Oracle
from tests.cluster.waiting import eventually

PROMPT = "the prompt of a client that does not wait for the answer; " * 2
HALF_A_POOL = "x" * 1200
GATE = "xfer:layer=1"


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


def running(cluster: ProcessCluster) -> list[float]:
    return [cluster.metrics(name)["requests"] for name in ("decode-0", "decode-1")]


def waiting(cluster: ProcessCluster) -> float:
    return sum(cluster.metrics(name)["requests_waiting"] for name in ("decode-0", "decode-1"))


def tokens_made(cluster: ProcessCluster) -> float:
    return sum(cluster.metrics(name)["requests_tokens_total"] for name in ("decode-0", "decode-1"))
