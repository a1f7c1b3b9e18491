"""A prefill node is killed: before, in the middle of, between two layers of and after its part of a request."""

import pytest

from tests.cluster.exchange import DONE, text_of
from tests.cluster.harness import PAGE, ProcessCluster
from tests.cluster.invariants import expect_poison_whole, invariants
from tests.cluster.oracle import Oracle
from tests.cluster.waiting import eventually

PROMPT = "the prompt whose KV is on its way when the prefill node dies; " * 3
TOKENS = 8
RESOLVE_S = 8.0
GATE = "xfer:layer=1"
TWINS = ("prefill-0", "prefill-1")
FIVE_CHUNKS = "v" * 300
CHUNK = 64
HALF_A_POOL = "x" * 1200
ENDLESS = 1500


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
        assert asked.json()["error"]["code"] == "no_prefill"
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
    """MX05: all KV is there, neither has joined the batch. Nobody is left who could be asked for it again."""
    expected = oracle.completion(PROMPT, TOKENS).text
    with cluster.held("decode:join", "decode-0", "decode-1") as gate:
        asked = [cluster.ask(PROMPT, TOKENS) for _ in range(2)]
        gate.reached("decode-0")
        gate.reached("decode-1")
        cluster.nodes["prefill-0"].process.kill()
    for exchange in asked:
        with exchange:
            body = exchange.json()
        assert body["choices"][0]["text"] == expected


@pytest.fixture
def twins(cluster: ProcessCluster) -> ProcessCluster:
    """With a second prefill node."""
    cluster.add("prefill", "prefill-1")
    cluster.wait_ready("prefill-1")
    return cluster


@pytest.mark.slow
def test_requests_that_queue_behind_it_go_to_the_other_one(twins: ProcessCluster, oracle: Oracle) -> None:
    """MX01: both decode nodes are full, a third request waits for pages; nobody waits for the dead."""
    prompts = [f"{i} {HALF_A_POOL}" for i in range(3)]
    with invariants(twins, *TWINS):
        with twins.held(GATE, *TWINS) as gate:
            asked = [twins.ask(prompt, TOKENS) for prompt in prompts[:2]]
            victim = gate.reached_first()
            asked.append(twins.ask(prompts[2], TOKENS))
            eventually(lambda: waiting(twins) == 1, "the third one waits")
            twins.nodes[victim].process.kill()
        for prompt, exchange in zip(prompts, asked, strict=True):
            with exchange:
                body = exchange.json()
            assert body["choices"][0]["text"] == oracle.completion(prompt, TOKENS).text
            assert body["kvferry"]["attempts"] <= 2


@pytest.mark.slow
def test_between_two_chunks_the_prompt_is_computed_from_its_beginning_by_the_other_one(
    twins: ProcessCluster, oracle: Oracle
) -> None:
    """MX02: the first chunk's pages have arrived. Pages of a new generation take their place."""
    before = counted(twins)
    with invariants(twins, *TWINS):
        with twins.held(f"prefill:from={CHUNK}", *TWINS) as gate:
            asked = twins.ask(FIVE_CHUNKS, TOKENS)
            victim = gate.reached_first()
            eventually(lambda: counted(twins) >= before + CHUNK // PAGE * 3, "the first chunk is there")
            twins.nodes[victim].process.kill()
        with asked:
            body = asked.json()
        assert body["choices"][0]["text"] == oracle.completion(FIVE_CHUNKS, TOKENS).text
        assert (body["kvferry"]["attempts"], body["kvferry"]["prefill_node"] == victim) == (2, False)
    expect_poison_whole(twins, oracle)


@pytest.mark.slow
def test_a_stream_that_has_begun_goes_on(cluster: ProcessCluster, oracle: Oracle) -> None:
    """MX06: the decode node needs nobody for it."""
    with invariants(cluster, "prefill-0"):
        with cluster.held("stream:tok=5", "router") as gate:
            asked = cluster.ask(PROMPT, 200, stream=True)
            gate.reached("router")
            cluster.nodes["prefill-0"].process.kill()
        with asked:
            *shown, last = asked.events()
        assert last == DONE and text_of(shown) == oracle.completion(PROMPT, 200).text


@pytest.mark.slow
def test_one_that_another_process_replaces_at_once_is_nobodys_peer_any_more(
    cluster: ProcessCluster, oracle: Oracle
) -> None:
    """P18: on the same port, before a heartbeat is missed, with a request on its way. Nothing of the old instance is
    kept, and requests that come after the swap do not notice it."""
    with cluster.ask(PROMPT, TOKENS) as first:
        assert first.text() == oracle.completion(PROMPT, TOKENS).text
    old = cluster.nodes["prefill-0"].instance
    with invariants(cluster, "prefill-0"):
        with cluster.held(GATE, "prefill-0") as gate:
            moving = cluster.ask(PROMPT, TOKENS)
            gate.reached("prefill-0")
            new = cluster.replace_prefill().instance
        with moving:
            assert moving.status in (200, 502, 503)
        for _ in range(4):
            with cluster.ask(PROMPT, TOKENS) as asked:
                body = asked.json()
            assert body["choices"][0]["text"] == oracle.completion(PROMPT, TOKENS).text
            assert body["kvferry"]["attempts"] == 1
    assert new != old and old not in {member["instance"] for member in cluster.members()}
    for name in ("decode-0", "decode-1"):
        metrics = cluster.metrics(name)
        assert metrics["peers"] <= 1 and metrics["prefill_links"] <= 1 and metrics["lingering_landings"] == 0


@pytest.mark.slow
def test_source_pages_are_kept_for_their_last_write(cluster: ProcessCluster, oracle: Oracle) -> None:
    """P03: the prefill pool holds one prompt; the next one is not begun before the writes of the first are out."""
    cluster.replace_prefill("--num-blocks", "24")
    prompts = [f"{i} {FIVE_CHUNKS}" for i in range(2)]
    with invariants(cluster):
        with cluster.held(GATE, "prefill-0") as gate:
            asked = [cluster.ask(prompts[0], TOKENS)]
            gate.reached("prefill-0")
            kept = cluster.page_owners("prefill-0")
            asked.append(cluster.ask(prompts[1], TOKENS))
            eventually(lambda: cluster.metrics("prefill-0")["prompts_waiting"] == 1, "the other prompt waits")
            assert cluster.page_owners("prefill-0") == kept and len(kept) > 12
        for prompt, exchange in zip(prompts, asked, strict=True):
            with exchange:
                assert exchange.text() == oracle.completion(prompt, TOKENS).text
    cluster.replace_prefill()


def waiting(cluster: ProcessCluster) -> float:
    return sum(cluster.metrics(name)["requests_waiting"] for name in ("decode-0", "decode-1"))


def counted(cluster: ProcessCluster) -> float:
    """Immediates, by both decode nodes."""
    return sum(cluster.metrics(name)["fabric_immediates_counted_total"] for name in ("decode-0", "decode-1"))
