"""A prefill node is killed between two layers of a transfer."""

from tests.cluster.harness import ProcessCluster
from tests.cluster.oracle import Oracle
from tests.cluster.waiting import eventually

PROMPT = "the prompt whose KV is on its way when the prefill node dies; " * 3
TOKENS = 8
RESOLVE_S = 8.0
GATE = "xfer:layer=1"


def test_without_another_one_the_client_gets_503_and_a_restarted_one_serves_at_once(
    cluster: ProcessCluster, oracle: Oracle
) -> None:
    """P06, P17, P19: no page stays behind, the decode nodes stay healthy, and the newcomer on the old port is used
    without a restart of anybody."""
    pids = cluster.pids()
    port = cluster.control_address("prefill-0").rpartition(":")[2]
    with cluster.held(GATE, "prefill-0") as gate:
        asked = cluster.ask(PROMPT, TOKENS)
        gate.reached("prefill-0")
        cluster.nodes["prefill-0"].process.kill()
    healthy: list[int] = []

    def pages_back() -> bool:
        healthy.extend(cluster.get(name, "/health").status_code for name in ("decode-0", "decode-1"))
        return all(set(cluster.page_states(name)) == {"free"} for name in ("decode-0", "decode-1"))

    eventually(pages_back, "every decode page is free", RESOLVE_S)
    assert set(healthy) == {200}
    with asked:
        assert asked.status == 503, asked.json()
        assert asked.response.headers["Retry-After"]
        assert asked.json()["error"]["code"] == "no_capacity"
    cluster.restart("prefill-0", "--port", port)
    cluster.wait_ready("prefill-0")
    with cluster.ask(PROMPT, TOKENS) as again:
        assert again.text() == oracle.completion(PROMPT, TOKENS).text
    now = cluster.pids()
    assert now.pop("prefill-0") != pids.pop("prefill-0")
    assert now == pids


def test_the_request_goes_to_the_other_prefill_node(cluster: ProcessCluster, oracle: Oracle) -> None:
    """MX03, P22: with a twin a killed prefill node costs no request, only another attempt."""
    both = ("prefill-0", "prefill-1")
    cluster.add("prefill", "prefill-1")
    cluster.wait_ready("prefill-1")
    with cluster.held(GATE, *both) as gate, cluster.ask(PROMPT, TOKENS) as asked:
        victim = gate.reached_first()
        cluster.nodes[victim].process.kill()
        (twin,) = {*both} - {victim}
        gate.release(twin)
        body = asked.json()
    assert body["choices"][0]["text"] == oracle.completion(PROMPT, TOKENS).text
    assert (body["kvferry"]["attempts"], body["kvferry"]["prefill_node"]) == (2, twin)


def test_requests_that_have_their_kv_do_not_notice(cluster: ProcessCluster, oracle: Oracle) -> None:
    """MX05: all KV is there, neither has joined the batch."""
    expected = oracle.completion(PROMPT, TOKENS).text
    with cluster.held("decode:join", "decode-0", "decode-1") as gate:
        asked = [cluster.ask(PROMPT, TOKENS) for _ in range(2)]
        gate.reached("decode-0")
        gate.reached("decode-1")
        cluster.nodes["prefill-0"].process.kill()
    for exchange in asked:
        with exchange:
            assert exchange.text() == expected
