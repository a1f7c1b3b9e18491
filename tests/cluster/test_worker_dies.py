"""A process of a node of several ranks is killed: the node says so and ends, and its requests end or go elsewhere."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cluster.exchange import DONE, text_of
from tests.cluster.harness import Node, ProcessCluster
from tests.cluster.oracle import Oracle
from tests.cluster.waiting import eventually

PROMPT = "the prompt of a request whose node loses a rank; " * 3
TOKENS = 8
ENDLESS = 1500
START_S = 120.0
"""A worker is a process from scratch, which reads torch and transformers anew."""
LOST = 4
"""The exit code of a node that is of no use any more."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def workers_of(node: Node) -> list[int]:
    """The processes that this node's engines run in, beside its own."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == node.process.pid and b"engine.workers" in command:
            found.append(int(folder.name))
    return found


def kill_a_worker(node: Node) -> None:
    (worker,) = workers_of(node)
    os.kill(worker, signal.SIGKILL)


def add_decode_of_two_ranks(cluster: ProcessCluster, instead_of: tuple[str, ...]) -> Node:
    for name in instead_of:
        cluster.nodes[name].process.kill()
    node = cluster.add("decode", "decode-parallel", "--tp", "2")
    cluster.wait_ready(node.name, seconds=START_S)
    cluster.wait_forgotten(*instead_of)
    return node


def expect_end(node: Node) -> None:
    """It says why, and nothing of it is left."""
    assert node.process.wait() == LOST
    assert "was killed by SIGKILL" in node.process.log.read_text()
    assert workers_of(node) == []


def test_of_a_prefill_node_the_request_goes_to_another_one(cluster: ProcessCluster, oracle: Oracle) -> None:
    both = ("prefill-0", "prefill-parallel")
    cluster.add("prefill", "prefill-parallel", "--tp", "2")
    cluster.wait_ready("prefill-parallel", seconds=START_S)
    victim = cluster.nodes["prefill-parallel"]
    with cluster.held("xfer:layer=1", *both) as gate:
        asked = [cluster.ask(PROMPT, TOKENS) for _ in range(2)]
        gate.reached("prefill-parallel")
        kill_a_worker(victim)
        expect_end(victim)
        gate.release("prefill-0")
    for exchange in asked:
        with exchange:
            assert exchange.text() == oracle.completion(PROMPT, TOKENS).text
    cluster.wait_at_rest()


@pytest.mark.parametrize(
    ("gate", "nodes"), [("xfer:layer=1", ("prefill-0",)), ("decode:join", ("decode-0", "decode-parallel"))]
)
def test_of_a_decode_node_a_request_that_was_not_shown_goes_to_another_one(
    cluster: ProcessCluster, oracle: Oracle, gate: str, nodes: tuple[str, ...]
) -> None:
    """With its KV under way, and once it has come."""
    victim = add_decode_of_two_ranks(cluster, instead_of=("decode-1",))
    with cluster.held(gate, *nodes) as held:
        asked = [cluster.ask(f"{PROMPT} {i}", TOKENS, stream=True) for i in range(2)]
        for name in nodes:
            held.reached(name)
        eventually(lambda: {*cluster.decodes_of_last(2)} == {"decode-0", "decode-parallel"}, "each has one")
        kill_a_worker(victim)
        expect_end(victim)
    for i, exchange in enumerate(asked):
        with exchange:
            events = list(exchange.events())
        assert events[-1] == DONE and text_of(events) == oracle.completion(f"{PROMPT} {i}", TOKENS).text
    cluster.wait_at_rest()


def test_of_a_decode_node_a_stream_that_was_shown_ends_with_one_error(cluster: ProcessCluster, oracle: Oracle) -> None:
    victim = add_decode_of_two_ranks(cluster, instead_of=("decode-0", "decode-1"))
    with cluster.held("stream:tok=5", "router") as gate:
        asked = cluster.ask(PROMPT, ENDLESS, stream=True)
        gate.reached("router")
        kill_a_worker(victim)
        expect_end(victim)
    with asked:
        *shown, last = list(asked.events())
    assert json.loads(last)["error"]["code"] == "node_lost" and DONE not in shown
    text = text_of(shown)
    assert text and oracle.completion(PROMPT, ENDLESS).text.startswith(text)
    cluster.wait_at_rest()
