"""The router is killed: the nodes stop what nobody waits for any more, and serve again once it is back."""

import httpx
import pytest

from tests.cluster.exchange import DONE
from tests.cluster.harness import ProcessCluster
from tests.cluster.oracle import Oracle
from tests.cluster.waiting import eventually

PROMPT = "the prompt of a request whose router dies; " * 3
GATE = "xfer:layer=1"
ENDLESS = 1500
RESOLVE_S = 8.0
RECOVER_S = 12.0
NODES = ("prefill-0", "decode-0", "decode-1")


def test_nodes_drop_the_work_of_a_dead_router_and_serve_the_next_one(cluster: ProcessCluster, oracle: Oracle) -> None:
    """MX12, MX13: one request streams, one is between two layers of its transfer."""
    pids = cluster.pids()
    pages = {name: f"{cluster.status_address(name)}/metrics" for name in NODES}
    streaming = cluster.ask("stream", ENDLESS, stream=True)
    events = streaming.events()
    assert next(events)
    with cluster.held(GATE, "prefill-0") as gate:
        moving = cluster.ask(PROMPT, 8)
        gate.reached("prefill-0")
        cluster.kill_router()
        eventually(lambda: all(at_rest(pages[name]) for name in NODES), "no node works any more", RESOLVE_S)
    with streaming:
        assert DONE not in list(events)
    with moving, pytest.raises(ConnectionError):
        moving.json()
    cluster.restart_router()
    eventually(lambda: cluster.http.get("/ready").status_code == 200, "the nodes are back", RECOVER_S)
    with cluster.ask(PROMPT, 8) as asked:
        assert asked.text() == oracle.completion(PROMPT, 8).text
    now = cluster.pids()
    assert now.pop("router") != pids.pop("router")
    assert now == pids


def at_rest(metrics_page: str) -> bool:
    """Asked without the router."""
    lines = httpx.get(metrics_page, trust_env=False).text.splitlines()
    values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
    held = values["kvferry_pages_total"] - values["kvferry_pages_free"]
    return not (held or values["kvferry_transfers"] or values.get("kvferry_requests"))
