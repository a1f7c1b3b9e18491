"""A decode node is killed: before anything of its request was shown, and in the middle of a stream."""

import json
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.exchange import DONE, key_of, text_of
from tests.cluster.harness import ProcessCluster
from tests.cluster.invariants import invariants
from tests.cluster.oracle import Oracle
from tests.cluster.serving import BOTH, expect_both_serve
from tests.cluster.waiting import eventually

PROMPT = "the prompt of a request whose decode node dies"
FIVE_CHUNKS = "u" * 300
CHUNK = 64
WINDOW = 12
CLIENTS = 8
RESOLVE_S = 8.0
ENDLESS = 1500
"""More tokens than a decode node makes in the time that it takes to kill it."""


def test_before_the_first_token_the_request_goes_to_the_other_decode_node(
    cluster: ProcessCluster, oracle: Oracle
) -> None:
    """MX09, P22: its KV had arrived. The other node's own request is not disturbed."""
    with cluster.held("decode:join", *BOTH) as gate:
        asked = [cluster.ask(f"{PROMPT} {i}", 12, stream=True) for i in range(2)]
        for name in BOTH:
            gate.reached(name)
        cluster.nodes["decode-0"].process.kill()
    for i, exchange in enumerate(asked):
        with exchange:
            events = list(exchange.events())
        assert events[-1] == DONE
        assert text_of(events) == oracle.completion(f"{PROMPT} {i}", 12).text
    assert cluster.metrics("router")["router_retries_total"] >= 1


def test_in_the_middle_of_a_transfer_the_request_goes_to_the_other_decode_node(
    cluster: ProcessCluster, oracle: Oracle
) -> None:
    """MX08, MX09: the prefill node is left with writes to a dead peer, and serves the second attempt."""
    with cluster.held("xfer:layer=1", "prefill-0") as gate:
        asked = cluster.ask(PROMPT, 12)
        gate.reached("prefill-0")
        (victim,) = cluster.decodes_of_last(1)
        cluster.nodes[victim].process.kill()
    with asked:
        assert asked.text() == oracle.completion(PROMPT, 12).text
    assert cluster.decodes_of_last(1) != [victim]
    cluster.wait_at_rest()


def test_a_stream_that_was_shown_ends_with_one_error_and_service_goes_on(
    cluster: ProcessCluster, oracle: Oracle
) -> None:
    """MX11, P22: a correct prefix, one error event, no end marker; nothing leaks on the prefill node; the other decode
    node serves, and the killed one again once it is back."""
    before = cluster.tokens_received()
    with cluster.held("stream:tok=5", "router") as gate:
        asked = cluster.ask(PROMPT, ENDLESS, stream=True)
        gate.reached("router")
        events = asked.events()
        first = next(events)
        victim = cluster.decode_of(key_of(first))
        cluster.nodes[victim].process.kill()
    with asked:
        *shown, last = [first, *events]
    assert list(json.loads(last)) == ["error"]
    assert json.loads(last)["error"]["code"] == "node_lost"
    assert DONE not in shown and not any("error" in json.loads(data) for data in shown)
    received = cluster.tokens_received() - before
    assert 5 <= received < ENDLESS
    text = text_of(shown)
    assert text and oracle.completion(PROMPT, received).text.startswith(text)
    eventually(lambda: set(cluster.page_states("prefill-0")) == {"free"}, "all prefill pages are free", RESOLVE_S)
    with cluster.ask(PROMPT, 12) as asked:
        assert asked.text() == oracle.completion(PROMPT, 12).text
    cluster.restart(victim)
    cluster.wait_ready(victim)
    expect_both_serve(cluster, oracle)


@pytest.mark.slow
def test_between_two_chunks_the_prefill_node_stops_and_serves_the_other_one(
    cluster: ProcessCluster, oracle: Oracle
) -> None:
    """MX08: it stands before the second of five chunks, computes at most that one for the dead, and has every page
    back."""
    with invariants(cluster, *BOTH):
        with cluster.held(f"prefill:from={CHUNK}", "prefill-0") as gate:
            asked = cluster.ask(FIVE_CHUNKS, 12)
            gate.reached("prefill-0")
            (victim,) = cluster.decodes_of_last(1)
            instance = cluster.nodes[victim].instance or ""
            cluster.nodes[victim].process.kill()
        with asked:
            assert asked.text() == oracle.completion(FIVE_CHUNKS, 12).text
        eventually(lambda: not any(instance in owner for owner in cluster.page_owners("prefill-0")), "pages are back")


@pytest.mark.slow
def test_transfers_to_other_decode_nodes_do_not_notice(cluster: ProcessCluster, oracle: Oracle) -> None:
    """MX09: one each between two layers. The prefill node drops what it had for the dead one."""
    prompts = [f"{PROMPT} {i}, of which the KV is on its way" for i in range(2)]
    with invariants(cluster, *BOTH):
        with cluster.held("xfer:layer=1", "prefill-0") as gate:
            asked = [cluster.ask(prompt, 12) for prompt in prompts]
            gate.reached("prefill-0")
            eventually(lambda: {*cluster.decodes_of_last(2)} == {*BOTH}, "each node has one")
            cluster.nodes["decode-0"].process.kill()
            eventually(lambda: len(cluster.decodes_of_last(3)) == 3, "the router has sent it to the other one")
        bodies = []
        for exchange in asked:
            with exchange:
                bodies.append(exchange.json())
    assert [body["choices"][0]["text"] for body in bodies] == [oracle.completion(p, 12).text for p in prompts]
    assert [body["kvferry"]["attempts"] for body in bodies] == [1, 1], "of each decode node that was asked"
    assert {body["kvferry"]["decode_node"] for body in bodies} == {"decode-1"}


@pytest.mark.slow
def test_a_newcomer_gets_no_more_than_twice_its_share(cluster: ProcessCluster, oracle: Oracle) -> None:
    """P24: three decode nodes under eight clients that never rest, one is killed and comes back empty."""
    cluster.add("decode", "decode-2")
    cluster.wait_ready("decode-2")
    stopped: deque[bool] = deque()

    def client(number: int) -> int:
        answers = 0
        while not stopped:
            with cluster.ask(f"{number} {PROMPT}", 12) as asked:
                assert asked.text() == oracle.completion(f"{number} {PROMPT}", 12).text
            answers += 1
        return answers

    for number in range(CLIENTS):
        oracle.completion(f"{number} {PROMPT}", 12)
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            eventually(lambda: len(sent_to(cluster)) > 2 * CLIENTS, "all are busy")
            cluster.nodes["decode-2"].process.kill()
            cluster.wait_forgotten("decode-2")
            before = len(sent_to(cluster))
            cluster.restart("decode-2")
            cluster.wait_ready("decode-2")
            eventually(lambda: sent_to(cluster)[before:].count("decode-2") > WINDOW, "the newcomer serves")
        finally:
            stopped.append(True)
        assert all(done.result() for done in clients)
    after = sent_to(cluster)[before:]
    windows = [after[start : start + WINDOW] for start in range(len(after) - WINDOW + 1)]
    assert max(window.count("decode-2") for window in windows) <= 2 * WINDOW / 3


def sent_to(cluster: ProcessCluster) -> list[str]:
    """The decode node of every request so far."""
    return [line["decode"] for line in cluster.events("router") if line["event"] == "request sent"]
