"""A process stands still (SIGSTOP): shorter than detection takes, and nothing happens; longer, and it is replaced."""

import json
from contextlib import ExitStack
from threading import Event

import pytest

from tests.cluster.exchange import DONE, key_of, text_of
from tests.cluster.harness import ProcessCluster
from tests.cluster.invariants import invariants
from tests.cluster.oracle import Oracle
from tests.cluster.serving import expect_both_serve
from tests.cluster.waiting import eventually

PROMPT = "the prompt of a request one of whose processes stands still; " * 3
GATE = "xfer:layer=1"
FIVE_CHUNKS = "t" * 300
SECOND_CHUNK = "prefill:from=64"
HALF_A_POOL = "x" * 1200
REST_OF_A_POOL = "y" * 848
BOTH = ("decode-0", "decode-1")
TOKENS = 8
SHORT_S = 2.0
"""Of the four seconds in which three heartbeats are missed."""
RESOLVE_S = 8.0
ENDLESS = 1500


def nodes_lost(cluster: ProcessCluster) -> float:
    return cluster.metrics("router")["router_nodes_lost_total"]


def test_a_short_pause_of_the_prefill_node_only_takes_time(cluster: ProcessCluster, oracle: Oracle) -> None:
    """MX14: between two layers."""
    lost = nodes_lost(cluster)
    with cluster.held(GATE, "prefill-0") as gate, cluster.ask(PROMPT, TOKENS) as asked:
        gate.reached("prefill-0")
        with cluster.paused("prefill-0"):
            Event().wait(SHORT_S)
        gate.release("prefill-0")
        body = asked.json()
    assert body["choices"][0]["text"] == oracle.completion(PROMPT, TOKENS).text
    assert (body["kvferry"]["attempts"], nodes_lost(cluster)) == (1, lost)


def test_a_short_pause_of_decode_node_and_router_only_takes_time(cluster: ProcessCluster, oracle: Oracle) -> None:
    """MX15, MX16: in the middle of a stream."""
    lost = nodes_lost(cluster)
    with cluster.ask(PROMPT, 200, stream=True) as asked:
        events = asked.events()
        first = next(events)
        for name in (cluster.decode_of(key_of(first)), "router"):
            with cluster.paused(name):
                Event().wait(SHORT_S)
        rest = list(events)
    assert rest[-1] == DONE
    assert text_of([first, *rest]) == oracle.completion(PROMPT, 200).text
    assert nodes_lost(cluster) == lost


@pytest.mark.parametrize(
    ("gate_name", "prompt"), [(GATE, PROMPT), pytest.param(SECOND_CHUNK, FIVE_CHUNKS, marks=pytest.mark.slow)]
)
def test_a_long_pause_of_the_prefill_node_sends_the_request_elsewhere(
    cluster: ProcessCluster, oracle: Oracle, gate_name: str, prompt: str
) -> None:
    """MX17: its transfer is fenced, and when it wakes it is used again, in the same process."""
    both = ("prefill-0", "prefill-1")
    cluster.add("prefill", "prefill-1")
    cluster.wait_ready("prefill-1")
    pids = cluster.pids()
    with cluster.held(gate_name, *both) as gate, cluster.ask(prompt, TOKENS) as asked:
        sleeping = gate.reached_first()
        (twin,) = {*both} - {sleeping}
        with cluster.paused(sleeping):
            gate.release(twin)
            body = asked.json()
            cluster.wait_forgotten(sleeping)
        gate.release(sleeping)
    assert body["choices"][0]["text"] == oracle.completion(prompt, TOKENS).text
    assert (body["kvferry"]["attempts"], body["kvferry"]["prefill_node"]) == (2, twin)
    cluster.wait_ready(sleeping)
    cluster.wait_at_rest()
    assert cluster.pids() == pids
    cluster.nodes[twin].process.terminate()
    assert cluster.nodes[twin].process.wait() == 0
    with cluster.ask(PROMPT, TOKENS) as again:
        assert again.text() == oracle.completion(PROMPT, TOKENS).text


def test_a_decode_node_that_stands_still_keeps_no_page_of_the_prefill_node(
    cluster: ProcessCluster, oracle: Oracle
) -> None:
    """P10: they return without any new request; its own goes to the other decode node."""
    with cluster.held(GATE, "prefill-0") as gate:
        asked = cluster.ask(PROMPT, TOKENS)
        gate.reached("prefill-0")
        (name,) = cluster.decodes_of_last(1)
        instance = cluster.nodes[name].instance or ""
        assert any(instance in owner for owner in cluster.page_owners("prefill-0"))
        with cluster.paused(name), asked:

            def pages_back() -> bool:
                return not any(instance in owner for owner in cluster.page_owners("prefill-0"))

            eventually(pages_back, "nothing is held for it", RESOLVE_S)
            gate.release("prefill-0")
            assert asked.text() == oracle.completion(PROMPT, TOKENS).text
    assert cluster.decodes_of_last(1) != [name]


def test_a_long_pause_of_the_decode_node_cuts_its_stream(cluster: ProcessCluster, oracle: Oracle) -> None:
    """MX18: when it wakes it does not go on with work that nobody waits for, and is used again."""
    pids, before = cluster.pids(), cluster.tokens_received()
    with cluster.ask(PROMPT, ENDLESS, stream=True) as asked:
        events = asked.events()
        first = next(events)
        name = cluster.decode_of(key_of(first))
        with cluster.paused(name):
            *shown, last = events
            cluster.wait_forgotten(name)
    assert json.loads(last)["error"]["code"] == "node_lost"
    received = cluster.tokens_received() - before
    assert oracle.completion(PROMPT, received).text.startswith(text_of([first, *shown]))
    cluster.wait_ready(name)
    cluster.wait_at_rest(RESOLVE_S)
    assert cluster.metrics(name)["requests_tokens_total"] < ENDLESS
    assert cluster.pids() == pids
    expect_both_serve(cluster, oracle)


@pytest.mark.slow
def test_a_pool_full_of_what_sleeping_decode_nodes_asked_for_empties_by_itself(cluster: ProcessCluster) -> None:
    """P10: not one page is left, nothing new is sent, and the router does not say that it could serve."""
    asked = []
    with invariants(cluster), ExitStack() as asleep:
        with cluster.held(GATE, "prefill-0") as gate:
            asked = [cluster.ask(HALF_A_POOL, TOKENS), cluster.ask(REST_OF_A_POOL, TOKENS)]
            gate.reached("prefill-0")
            eventually(lambda: "free" not in cluster.page_states("prefill-0"), "the prefill pool is full")
            for name in BOTH:
                asleep.enter_context(cluster.paused(name))
            eventually(lambda: set(cluster.page_states("prefill-0")) == {"free"}, "every page is back")
        eventually(lambda: cluster.http.get("/ready").status_code == 503, "nobody could serve, and it says so")
        asleep.close()
        for exchange in asked:
            exchange.leave()
        cluster.wait_ready(*BOTH)


@pytest.mark.slow
def test_control_messages_for_a_prefill_node_that_stands_still_block_nobody(
    cluster: ProcessCluster, oracle: Oracle
) -> None:
    """P20: requests, aborts and heartbeats for it pile up, those of many requests; the decode nodes answer, their
    requests are served by the twin, and after it wakes no prompt is computed twice."""
    cluster.add("prefill", "prefill-1")
    cluster.wait_ready("prefill-1")
    prompts = [f"{number} is in line" for number in range(40)]
    with invariants(cluster):
        with cluster.paused("prefill-0"):
            for _ in range(20):
                for exchange in [cluster.ask(f"{PROMPT} for nobody", 2) for _ in range(16)]:
                    exchange.leave()
                assert {cluster.get(name, "/health").status_code for name in BOTH} == {200}
            for prompt in prompts:
                with cluster.ask(prompt, TOKENS) as asked:
                    body = asked.json()
                assert body["choices"][0]["text"] == oracle.completion(prompt, TOKENS).text
                assert body["kvferry"]["prefill_node"] == "prefill-1"
        cluster.wait_ready("prefill-0")
        cluster.wait_at_rest()
    accepted = [line["request"] for line in cluster.events("prefill-0") if line["event"] == "prefill accepted"]
    assert len(set(accepted)) == len(accepted)
