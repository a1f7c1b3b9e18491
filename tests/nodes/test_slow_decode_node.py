"""A decode node that takes nothing of what is written to it, beside one that does, at one prefill node."""

from contextlib import closing
from pathlib import Path

import pytest

from kv_messenger import peers, sessions
from protocol.gates import GateClient
from protocol.sampling import SamplingParams
from tests.nodes.conftest import open_named
from tests.nodes.pair import Cluster, Shape, messenger_paused
from tests.nodes.prompts import prompt_of
from tests.oracle import Oracle

DEADLINE_S = 30.0
FEW = SamplingParams(max_new_tokens=2)
THREE_BLOCKS = 48
ROOM = 20
"""Blocks of the prefill node."""
GATE = "prefill:from=0"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is given up for silence."""
    monkeypatch.setattr(peers, "PEER_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(sessions, "PEER_TIMEOUT_S", DEADLINE_S)


@pytest.mark.usefixtures("patient")
def test_a_decode_node_that_stands_still_cannot_fill_the_prefill_node(
    tiny_model: Path, oracle: Oracle, seed: int, tmp_path: Path
) -> None:
    """Eight prompts for it would take more than there is. Three of them are computed and stay; the other decode node's
    requests are served all the same, while the rest waits; when it goes on, all of its own are."""
    shape = Shape(num_blocks=ROOM, decode_blocks=64)
    with (
        Cluster(tiny_model, open_named("net"), shape, gates=tmp_path).start(decode=2) as cluster,
        closing(GateClient(str(tmp_path / "prefill-0"))) as gate,
    ):
        router, prefill = cluster.router, cluster.prefill[0]
        still, living = (router.instance_of(name) for name in ("decode-0", "decode-1"))
        for decode in (still, living):
            router.ask(prompt_of(9, seed), FEW, decode=decode)[1].result()
        gate.hold(GATE)
        prompts = [prompt_of(THREE_BLOCKS + 1, seed + number) for number in range(8)]
        waiting = [router.ask(prompt, FEW, decode=still)[1] for prompt in prompts]
        router.wait_for(lambda _: prefill.resources()["transfers"] == 8)
        with messenger_paused(cluster.decode[0]):
            gate.release(GATE)
            for number in range(4):
                prompt = prompt_of(THREE_BLOCKS + 1, seed - 1 - number)
                _, answer = router.ask(prompt, FEW, decode=living)
                assert answer.result().failure is None and answer.tokens == oracle.greedy(prompt, 2)
            held = prefill.resources()
            assert (held["transfers"], held["prompts_waiting"], held["pages_free"]) == (8, 5, ROOM - 9)
        assert [answer.result().failure for answer in waiting] == [None] * 8
        assert [answer.tokens for answer in waiting] == [oracle.greedy(prompt, 2) for prompt in prompts]
        cluster.wait_pages_returned()
