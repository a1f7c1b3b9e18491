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
LOST = 4
"""The exit code of a node that is of no use any more."""

pytestmark = pytest.mark.slow


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


def expect_end(node: Node) -> None:
    """It says why, and nothing of it is left."""
    assert node.process.wait() == LOST
    assert "was killed by SIGKILL" in node.process.log.read_text()
    assert workers_of(node) == []


def test_of_a_prefill_node_the_request_goes_to_another_one(cluster: ProcessCluster, oracle: Oracle) -> None:
    both = ("prefill-0", "prefill-parallel")
    cluster.add("prefill", "prefill-parallel", "--tp", "2")
    cluster.wait_ready("prefill-parallel")
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
    eventually(lambda: not cluster.busy(), "every page and slot is back")


def test_of_a_decode_node_a_stream_that_was_shown_ends_with_one_error(cluster: ProcessCluster, oracle: Oracle) -> None:
    for name in ("decode-0", "decode-1"):
        cluster.nodes[name].process.kill()
    cluster.add("decode", "decode-parallel", "--tp", "2")
    cluster.wait_ready("decode-parallel")
    cluster.wait_forgotten("decode-0", "decode-1")
    victim = cluster.nodes["decode-parallel"]
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
    eventually(lambda: set(cluster.page_states("prefill-0")) == {"free"}, "all prefill pages are free")
