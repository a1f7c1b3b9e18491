"""Messages that nobody expects: repeated, for what is over or never was, of an unknown kind. Counted, answered, and
never waited for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from protocol.codec import decode
from protocol.curve import read_cluster_key
from protocol.messages import DecodeRequest, Failure, FailureCode, Nack, ToDecode
from tests.cluster.faulty_transport import Script
from tests.cluster.harness import ProcessCluster
from tests.cluster.invariants import invariants
from tests.cluster.oracle import Oracle
from tests.cluster.waiting import eventually
from tests.router.fake_node import FakeNode, node_status

pytestmark = pytest.mark.slow

PROMPT = "a prompt of which too much is said"
TOKENS = 8
BOTH = ("decode-0", "decode-1")
DEADLINE_MS = 30_000
STATUS = ("compatibility", "tokenizer", "model")


@pytest.fixture
def talkative(cluster: ProcessCluster, tmp_path: Path) -> Iterator[ProcessCluster]:
    """prefill-0 repeats itself."""
    script = tmp_path / "script.json"
    Script(repeat_words=True).write(script)
    cluster.replace_prefill("--no-same-host", script=script)
    yield cluster
    cluster.replace_prefill()


def unknown_completions(cluster: ProcessCluster) -> float:
    return sum(cluster.metrics(name)["transfers_unknown_completions_total"] for name in BOTH)


def test_last_words_that_come_again_or_out_of_nowhere_are_counted_and_dropped(
    talkative: ProcessCluster, oracle: Oracle
) -> None:
    """P14: for a live transfer twice, for one that is over, and for one that never was. No page is given back twice."""
    before = unknown_completions(talkative)
    prompts = [f"{number} {PROMPT}" for number in range(4)]
    with invariants(talkative):
        for prompt in prompts:
            with talkative.ask(prompt, TOKENS) as asked:
                body = asked.json()
            assert body["choices"][0]["text"] == oracle.completion(prompt, TOKENS).text
            assert body["kvferry"]["attempts"] == 1
        asked = talkative.ask(PROMPT, 1000, stream=True)
        assert next(asked.events())
        asked.leave()
        talkative.wait_at_rest()
    eventually(lambda: unknown_completions(talkative) - before >= len(prompts) + 1, "they are counted")
    assert all("Traceback" not in talkative.nodes[name].process.log.read_text() for name in BOTH)


def test_a_message_of_an_unknown_kind_is_answered(cluster: ProcessCluster, oracle: Oracle) -> None:
    """P25: by the prefill node and by the router."""
    with invariants(cluster), zmq.Context() as context:
        for address in (cluster.control_address("prefill-0"), cluster.nodes_address):
            with context.socket(zmq.DEALER) as socket:
                socket.linger = 0
                socket.routing_id = b"stranger"
                read_cluster_key(cluster.key).secure_client(socket)
                socket.connect(address)
                socket.send(msgpack.packb({"type": "OfALaterVersion", "answer": 42}))
                assert socket.poll(DEADLINE_MS)
                answer: Any = decode(socket.recv(), ToDecode)
            assert isinstance(answer, Nack) and answer.failure.code is FailureCode.UNSUPPORTED
        with cluster.ask(PROMPT, TOKENS) as asked:
            assert asked.text() == oracle.completion(PROMPT, TOKENS).text


def test_a_request_that_its_node_has_no_handler_for_goes_to_another_one(
    cluster: ProcessCluster, oracle: Oracle
) -> None:
    """P25: the least loaded decode node answers every request with a Nack."""

    def no_handler(node: FakeNode, request: DecodeRequest) -> None:
        node.say(Nack(failure=Failure(FailureCode.UNSUPPORTED, "no handler for a DecodeRequest")))

    known = {name: member[name] for name in STATUS for member in cluster.members() if member["name"] == "decode-0"}
    status = node_status("decode-unable", pages_total=4096, pages_free=4096, max_context=4096, **known)
    key = read_cluster_key(cluster.key)
    with FakeNode(cluster.nodes_address, key, status, no_handler).start() as unable, invariants(cluster):
        eventually(lambda: "decode-unable" in {m["name"] for m in cluster.members() if m["ready"]}, "it is used")
        for number in range(3):
            with cluster.ask(f"{number} {PROMPT}", TOKENS) as asked:
                assert asked.text() == oracle.completion(f"{number} {PROMPT}", TOKENS).text
        assert len(unable.requests) == 3
    cluster.wait_forgotten("decode-unable")
