"""A decode node is killed: before anything of its request was shown, and in the middle of a stream."""

import json

from tests.cluster.exchange import DONE, key_of, text_of
from tests.cluster.harness import ProcessCluster
from tests.cluster.oracle import Oracle
from tests.cluster.serving import BOTH, expect_both_serve
from tests.cluster.waiting import eventually

PROMPT = "the prompt of a request whose decode node dies"
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
