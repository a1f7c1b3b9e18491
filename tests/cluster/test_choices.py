"""P16: several choices of one request share one transfer, through real processes, and nothing of them stays behind."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.cluster.exchange import DONE, Exchange
from tests.cluster.harness import LEDGER, MODEL, PAGE, ProcessCluster
from tests.cluster.oracle import Oracle
from tests.cluster.waiting import eventually

PROMPT = "the prompt of which several continuations are wanted; " * 2
TOKENS = 12
N = 3
LAYERS = 3
DRAWN: dict[str, Any] = {"temperature": 1, "seed": 7, "ignore_eos": True}
GREEDY: dict[str, Any] = {"temperature": 0}


def ask(cluster: ProcessCluster, prompt: str = PROMPT, **fields: Any) -> Exchange:
    """Sent, not read."""
    body = {"model": MODEL, "prompt": prompt, "n": N, "max_tokens": TOKENS, **GREEDY, **fields}
    return cluster.send("/v1/completions", json.dumps(body).encode(), LEDGER)


def texts(body: Any) -> list[str]:
    """Of a whole answer, whose choices all ran to their limit or a stop string."""
    assert [choice["index"] for choice in body["choices"]] == list(range(N)), body
    assert {choice["finish_reason"] for choice in body["choices"]} <= {"length", "stop"}
    return [choice["text"] for choice in body["choices"]]


def answered(cluster: ProcessCluster, prompt: str = PROMPT, **fields: Any) -> Any:
    with ask(cluster, prompt, **fields) as exchange:
        assert exchange.status == 200, exchange.json()
        return exchange.json()


def test_eight_clients_get_three_choices_each_over_one_transfer_each(unharmed: ProcessCluster, oracle: Oracle) -> None:
    prompts = [f"{i} {PROMPT}" for i in range(4)]
    before = unharmed.metrics("prefill-0")["fabric_writes_posted_total"]
    with ThreadPoolExecutor(8) as pool:
        greedy = [pool.submit(answered, unharmed, prompt) for prompt in prompts]
        drawn = [pool.submit(answered, unharmed, prompts[0], **DRAWN) for _ in range(4)]
        answers = [asked.result() for asked in (*greedy, *drawn)]
    for prompt, body in zip(prompts, answers, strict=False):
        expected = oracle.completion(prompt, TOKENS)
        assert texts(body) == [expected.text] * N
        assert body["usage"]["prompt_tokens"] == expected.prompt_tokens
        assert body["usage"]["completion_tokens"] == N * TOKENS
    first, *others = [texts(body) for body in answers[len(prompts) :]]
    assert len(set(first)) == N, "each choice draws its own tokens"
    assert others == [first] * 3, "the same seed gives the same choices, on whichever node"
    pages = sum(-(-(body["usage"]["prompt_tokens"] - 1) // PAGE) for body in answers)
    assert sum(body["kvferry"]["writes"] for body in answers) == pages * LAYERS

    def posted() -> float:
        return unharmed.metrics("prefill-0")["fabric_writes_posted_total"] - before

    eventually(lambda: posted() >= pages * LAYERS, "the node's metrics, which lag, show its writes")
    assert posted() == pages * LAYERS
    unharmed.wait_at_rest()


def test_the_unmodified_client_reads_choices_streamed_and_not(client: openai.OpenAI) -> None:
    create = client.completions.create
    whole = create(model=MODEL, prompt=PROMPT, n=N, max_tokens=TOKENS, temperature=1, seed=3)
    joined, ends = [""] * N, []
    for chunk in create(model=MODEL, prompt=PROMPT, n=N, max_tokens=TOKENS, temperature=1, seed=3, stream=True):
        for choice in chunk.choices:
            joined[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason else []
    assert joined == [choice.text for choice in whole.choices] and len(set(joined)) == N
    assert sorted(ends) == list(range(N))
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": PROMPT}], n=N, max_tokens=TOKENS, seed=3
    )
    assert len({choice.message.content for choice in chat.choices}) == N
    assert chat.usage is not None and TOKENS < chat.usage.completion_tokens <= N * TOKENS


def test_a_stop_string_ends_the_one_choice_that_it_occurs_in(unharmed: ProcessCluster) -> None:
    plain = texts(answered(unharmed, max_tokens=40, **DRAWN))
    stop = next(plain[1][i : i + 2] for i in range(8, 40) if not any(plain[1][i : i + 2] in plain[j] for j in (0, 2)))
    cut = answered(unharmed, max_tokens=40, stop=[stop], **DRAWN)
    assert texts(cut) == [plain[0], plain[1][: plain[1].index(stop)], plain[2]]
    assert [choice["finish_reason"] for choice in cut["choices"]] == ["length", "stop", "length"]
    assert 2 * 40 < cut["usage"]["completion_tokens"] < 3 * 40
    unharmed.wait_at_rest()


@pytest.mark.parametrize("gate", ["xfer:layer=1", "decode:join", "stream:tok=4"])
def test_a_client_that_leaves_takes_all_its_choices_with_it(cluster: ProcessCluster, gate: str) -> None:
    names = {"x": ["prefill-0"], "d": ["decode-0", "decode-1"], "s": ["router"]}[gate[0]]
    pids = cluster.pids()
    with cluster.held(gate, *names) as held:
        asked = ask(cluster, max_tokens=1000, stream=True)
        held.reached_first()
        asked.leave()
        if gate[0] != "s":
            cluster.wait_at_rest()
    cluster.wait_at_rest()
    assert cluster.pids() == pids


def test_a_prefill_node_that_dies_in_between_costs_another_attempt_and_no_choice(
    cluster: ProcessCluster, oracle: Oracle
) -> None:
    both = ("prefill-0", "prefill-1")
    cluster.add("prefill", "prefill-1")
    cluster.wait_ready("prefill-1")
    with cluster.held("xfer:layer=1", *both) as gate, ask(cluster) as asked:
        victim = gate.reached_first()
        cluster.nodes[victim].process.kill()
        (twin,) = {*both} - {victim}
        gate.release(twin)
        body = asked.json()
    assert texts(body) == [oracle.completion(PROMPT, TOKENS).text] * N
    assert (body["kvferry"]["attempts"], body["kvferry"]["prefill_node"]) == (2, twin)


@pytest.mark.slow
def test_a_decode_node_that_dies_before_anything_was_shown_costs_no_choice(
    cluster: ProcessCluster, oracle: Oracle
) -> None:
    with cluster.held("decode:join", "decode-0", "decode-1") as gate:
        asked = ask(cluster, stream=True)
        victim = gate.reached_first()
        cluster.nodes[victim].process.kill()
    with asked:
        *chunks, done = asked.events()
    assert done == DONE
    joined = [""] * N
    for choice in (choice for chunk in chunks for choice in json.loads(chunk)["choices"]):
        joined[choice["index"]] += choice["text"]
    assert joined == [oracle.completion(PROMPT, TOKENS).text] * N
    cluster.wait_at_rest()
