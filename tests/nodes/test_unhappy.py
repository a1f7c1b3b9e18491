"""What goes wrong on the way of one request: one outcome each, pages safe until nobody can write, none lost.

Debug mode is on: a write into a page that was freed breaks its poison, one into a page in use its checksum.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from decode_node.node import DecodeNode
from fabric.api import Landing, TransferEngine
from fabric.simulated import Faults, SimulatedEngine, SimulatedNetwork
from kv_messenger import peers, receiver_transfer, sessions
from prefill_node.node import PrefillNode
from protocol.gates import GateClient
from protocol.messages import FailureCode, FinishReason, NodeStatus, PrefillAddress, Role
from protocol.sampling import SamplingParams
from tests.nodes.conftest import open_named
from tests.nodes.pair import Cluster, OpenFabric, Shape, blocks_of, messenger_paused
from tests.nodes.prompts import expect_oracle, prompt_of
from tests.oracle import Oracle
from tests.tiny_model import save_tiny_model

DEADLINE_S = 30.0
FEW = SamplingParams(max_new_tokens=4)


def simulated(faults: Faults, seed: int) -> OpenFabric:
    network = SimulatedNetwork(seed, faults)
    return lambda name: SimulatedEngine(network, name)


def wait_decode(cluster: Cluster, what: Callable[[NodeStatus], bool]) -> None:
    """Until `what` holds of the decode node; looked at with every NodeStatus."""
    cluster.router.wait_for(lambda nodes: any(node.role is Role.DECODE and what(node) for node in nodes.values()))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fence for silence: pages come back only when the sender has answered."""
    monkeypatch.setattr(receiver_transfer, "STOP_DEADLINE_S", DEADLINE_S)
    monkeypatch.setattr(peers, "PEER_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(sessions, "PEER_TIMEOUT_S", DEADLINE_S)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("fabric", ["net", "reordering"])
def test_pages_of_an_aborted_transfer_are_not_reused_before_the_sender_stopped(
    tiny_model: Path, oracle: Oracle, fabric: str, seed: int, tmp_path: Path
) -> None:
    """P01: A is aborted while its sender stands between two layers and cannot answer; B needs A's pages."""
    shape = Shape(page_size=16, num_blocks=16, decode_blocks=8)
    with Cluster(tiny_model, open_named(fabric, seed), shape, gates=tmp_path).start() as cluster:
        gate, decode = GateClient(str(tmp_path / "prefill-0")), cluster.decode[0]
        gate.hold("xfer:layer=1")
        first, aborted = cluster.router.ask(prompt_of(90, seed), FEW)
        assert gate.reached("xfer:layer=1", DEADLINE_S)
        held = blocks_of(decode, first)
        assert set(held.values()) == {"held"} and len(held) == 6
        with messenger_paused(cluster.prefill[0]):
            cluster.router.abort(first)
            assert aborted.result().reason is FinishReason.CANCELLED and aborted.tokens == []
            second, answer = cluster.router.ask(prompt := prompt_of(91, seed + 1), FEW)
            wait_decode(cluster, lambda node: (node.waiting, node.pages_quarantined, node.pages_free) == (1, 6, 2))
            assert blocks_of(decode, first) == dict.fromkeys(held, "quarantined")
            assert blocks_of(decode, second) == {} and not answer.tokens
        wait_decode(cluster, lambda node: (node.waiting, node.pages_quarantined) == (0, 0))
        assert len(blocks_of(decode, second).keys() & held.keys()) >= 4, "B has pages that were A's"
        gate.release("xfer:layer=1")
        assert answer.result().failure is None
        assert answer.tokens == oracle.greedy(prompt, 4)
        cluster.wait_pages_returned()
        gate.close()


@pytest.mark.parametrize("requests", [1, 2, 8])
def test_an_abort_between_arrival_and_join_leaves_nothing(
    tiny_model: Path, requests: int, seed: int, tmp_path: Path
) -> None:
    """P09: all KV is there, the request has not joined the batch."""
    with Cluster(tiny_model, open_named("net"), Shape(), gates=tmp_path).start() as cluster:
        gate = GateClient(str(tmp_path / "decode-0"))
        gate.hold("decode:join")
        asked = [cluster.router.ask(prompt_of(30 + i, seed), FEW) for i in range(requests)]
        assert gate.reached("decode:join", DEADLINE_S)
        for key, _ in asked:
            cluster.router.abort(key)
        for _, answer in asked:
            assert answer.result().reason is FinishReason.CANCELLED
        gate.release("decode:join")
        cluster.wait_pages_returned()
        assert all(answer.tokens == [] and len(answer.ended) == 1 for _, answer in asked)
        gate.close()


@pytest.mark.parametrize("failing", ["first", "middle", "last"])
def test_a_write_that_cannot_be_posted_is_a_failure_at_once_and_is_retried(
    tiny_model: Path, oracle: Oracle, failing: str, seed: int
) -> None:
    """P26: the sender says how many it posted; the second attempt gives the right tokens."""
    writes = 5 * 3
    post = {"first": 1, "middle": writes // 2, "last": writes}[failing]
    open_fabric = simulated(Faults(fail_post=post, reorder=True, max_delay=40), seed)
    with Cluster(tiny_model, open_fabric, Shape()).start() as cluster:
        prompt = prompt_of(5 * 16 + 1, seed)
        (end,) = expect_oracle(cluster, oracle, [prompt])
        assert end.ledger.attempts == 2 and end.ledger.writes == writes
        assert cluster.prefill[0].transfer_counters.stopped == 1


class FencesOnlyTheDead(SimulatedEngine):
    """As a reliable-datagram endpoint of EFA: what a live peer has posted cannot be shut out, only waited for."""

    def fence_needs_dead_peer(self, landing: Landing) -> bool:
        return True


@pytest.mark.parametrize("posted", [1, 7, 14])
def test_pages_of_a_failed_attempt_stay_out_of_use_until_every_posted_write_has_landed(
    tiny_model: Path, oracle: Oracle, posted: int, seed: int
) -> None:
    """P26, where no fence can help: `posted` writes are on their way while the second attempt has started."""
    network = SimulatedNetwork(seed, Faults(fail_post=posted + 1, reorder=True, max_delay=40))
    with Cluster(tiny_model, lambda name: FencesOnlyTheDead(network, name), Shape()).start() as cluster:
        receiver, decode = cast(SimulatedEngine, cluster.fabrics["decode-0"]), cluster.decode[0]
        network.hold(receiver)
        prompt = prompt_of(5 * 16 + 1, seed)
        key, answer = cluster.router.ask(prompt, FEW)
        wait_decode(cluster, lambda node: (node.pages_quarantined, node.pages_total - node.pages_free) == (6, 12))
        failed, present = blocks_of(decode, key, 1), blocks_of(decode, key, 2)
        assert set(failed.values()) == {"quarantined"} and set(present.values()) == {"held"}
        assert not failed.keys() & present.keys() and not answer.tokens
        network.release(receiver)
        assert answer.result().ledger.attempts == 2
        assert answer.tokens == oracle.greedy(prompt, 4)
        cluster.wait_pages_returned()


def test_pages_of_a_failed_attempt_come_back_by_the_fence_alone_where_it_may_be_used(
    tiny_model: Path, oracle: Oracle, seed: int
) -> None:
    """P26: writes of the first attempt are on their way and never land; its pages are fenced, then free."""
    network = SimulatedNetwork(seed, Faults(fail_post=8, reorder=True, max_delay=40))
    with Cluster(tiny_model, lambda name: SimulatedEngine(network, name), Shape()).start() as cluster:
        receiver, decode = cast(SimulatedEngine, cluster.fabrics["decode-0"]), cluster.decode[0]
        network.hold(receiver)
        prompt = prompt_of(5 * 16 + 1, seed)
        key, answer = cluster.router.ask(prompt, FEW)
        wait_decode(cluster, lambda _: len(blocks_of(decode, key, 2)) == 6 and not blocks_of(decode, key, 1))
        assert receiver.counters().immediates_counted == 0
        network.release(receiver)
        assert answer.result().ledger.attempts == 2
        assert answer.tokens == oracle.greedy(prompt, 4)
        cluster.wait_pages_returned()


@pytest.mark.parametrize(
    "faults",
    [Faults(fail_completion=7), Faults(drop_immediate=4), Faults(drop_immediate=15, reorder=True, max_delay=20)],
    ids=["failed completion", "lost immediate", "lost last immediate"],
)
def test_a_short_count_is_never_decoded(tiny_model: Path, oracle: Oracle, faults: Faults, seed: int) -> None:
    """P27: no hang, no guess: fence, then another attempt."""
    with Cluster(tiny_model, simulated(faults, seed), Shape()).start() as cluster:
        (end,) = expect_oracle(cluster, oracle, [prompt_of(5 * 16 + 1, seed)])
        assert end.ledger.attempts == 2


@dataclass(frozen=True)
class Difference:
    """How the other prefill node differs, and what the refusal says of it."""

    said: str
    model: Callable[[Path], Path]


DIFFERENCES = {
    "layers": Difference("groups of the KV differ", model=partial(save_tiny_model, layers=2)),
    "kv heads": Difference("prefill side 2, decode side 4", model=partial(save_tiny_model, kv_heads=2)),
    "weights": Difference("model, tokenizer or protocol version differ", model=partial(save_tiny_model, seed=1)),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_peer_that_cannot_be_paired_is_refused_and_nobody_falls(
    tiny_model: Path, oracle: Oracle, difference: str, seed: int, tmp_path: Path
) -> None:
    """P31, at the handshake: the router would not pair them, but a decode node must not rely on that."""
    differs = DIFFERENCES[difference]
    with Cluster(tiny_model, open_named("net"), Shape()).start() as cluster:
        cluster.add_prefill(model=differs.model(tmp_path))
        cluster.router.wait_for(lambda nodes: len(nodes) == 3)
        same, other = sorted(cluster.router.prefills(), key=lambda address: address.name)
        prompt = prompt_of(40, seed)
        _, refused = cluster.router.ask(prompt, FEW, prefills=[other])
        end = refused.result()
        assert end.failure is not None and end.failure.code is FailureCode.INCOMPATIBLE
        assert differs.said in end.failure.message
        _, answer = cluster.router.ask(prompt, FEW, prefills=[other, same])
        assert answer.result().failure is None and answer.tokens == oracle.greedy(prompt, 4)
        cluster.wait_pages_returned()


def test_a_ticket_for_another_instance_is_refused(tiny_model: Path, seed: int) -> None:
    with Cluster(tiny_model, open_named("net"), Shape()).start() as cluster:
        (address,) = cluster.router.prefills()
        stale = PrefillAddress("an-instance-that-was-here-before", address.name, address.address)
        _, answer = cluster.router.ask(prompt_of(40, seed), FEW, prefills=[stale])
        end = answer.result()
        assert end.failure is not None and end.failure.code is FailureCode.NO_PREFILL
        cluster.wait_pages_returned()


def test_too_long_a_prompt_is_refused_at_once(tiny_model: Path, oracle: Oracle, seed: int) -> None:
    """P12, first half; and P04: longer than the prefill node holds, though the decode node could."""
    shape = Shape(page_size=16, num_blocks=4, decode_blocks=16)
    with Cluster(tiny_model, open_named("net"), shape).start() as cluster:
        for tokens in (16 * 16 + 1, 4 * 16 + 2):
            _, answer = cluster.router.ask(prompt_of(tokens, seed), FEW)
            end = answer.result()
            assert end.failure is not None and end.failure.code is FailureCode.TOO_LONG, tokens
            assert answer.tokens == []
        expect_oracle(cluster, oracle, [prompt_of(4 * 16, seed)])


def test_requests_queue_for_pages_and_all_finish(tiny_model: Path, oracle: Oracle, seed: int) -> None:
    """P12, second half: a pool just big enough for one of four."""
    shape = Shape(page_size=16, num_blocks=32, decode_blocks=6)
    with Cluster(tiny_model, open_named("net"), shape).start() as cluster:
        expect_oracle(cluster, oracle, [prompt_of(70 + i, seed) for i in range(4)])


def test_source_pages_are_kept_until_their_writes_completed(tiny_model: Path, oracle: Oracle, seed: int) -> None:
    """P03: the prefill pool holds one prompt; the second must wait for the first one's last write."""
    shape = Shape(page_size=16, num_blocks=6, decode_blocks=32)
    faults = Faults(max_delay=200, reorder=True)
    with Cluster(tiny_model, simulated(faults, seed), shape).start() as cluster:
        expect_oracle(cluster, oracle, [prompt_of(80 + i, seed) for i in range(4)])


def test_the_deadline_ends_a_request_wherever_it_is(tiny_model: Path, seed: int, tmp_path: Path) -> None:
    with Cluster(tiny_model, open_named("net"), Shape(), gates=tmp_path).start() as cluster:
        gate = GateClient(str(tmp_path / "prefill-0"))
        gate.hold("xfer:layer=1")
        _, answer = cluster.router.ask(prompt_of(40, seed), FEW, deadline_s=1.0)
        end = answer.result()
        assert end.failure is not None and end.failure.code is FailureCode.DEADLINE
        cluster.wait_pages_returned()
        gate.close()


def test_a_router_that_restarts_finds_no_work_of_its_predecessor(tiny_model: Path, seed: int) -> None:
    with Cluster(tiny_model, open_named("net"), Shape()).start() as cluster:
        _, answer = cluster.router.ask(prompt_of(40, seed), SamplingParams(max_new_tokens=500, ignore_eos=True))
        answer.wait_tokens(3)
        cluster.router.instance = "router-2"
        assert answer.result().reason is FinishReason.CANCELLED
        cluster.wait_pages_returned()


def test_a_node_that_is_told_to_stop_says_so_at_once(tiny_model: Path) -> None:
    """Before its engines know: an idle one has gone a moment later."""
    with Cluster(tiny_model, open_named("net"), Shape()).start() as cluster:
        nodes: list[PrefillNode | DecodeNode] = [*cluster.prefill, *cluster.decode]
        for node in nodes:
            assert not node.status().draining
            node.drain(0.0)
            assert node.status().draining


def test_a_prefill_node_at_what_is_no_address_is_passed_over(tiny_model: Path, oracle: Oracle, seed: int) -> None:
    with Cluster(tiny_model, open_named("net"), Shape()).start() as cluster:
        nowhere = [PrefillAddress(f"instance-{i}", "nowhere", no) for i, no in enumerate(["nowhere", "tcp://host"])]
        _, answer = cluster.router.ask(
            prompt := prompt_of(40, seed), FEW, prefills=[*nowhere, *cluster.router.prefills()]
        )
        assert answer.result().failure is None and answer.result().ledger.attempts == 3
        assert answer.tokens == oracle.greedy(prompt, 4)
        cluster.wait_pages_returned()
        assert cluster.decode[0].resources()["prefill_links"] == 1


def test_random_aborts_leave_every_page_slot_and_region_as_it_was(tiny_model: Path, oracle: Oracle, seed: int) -> None:
    rng = random.Random(seed)
    with Cluster(tiny_model, open_named("reordering", seed), Shape(decode_blocks=24)).start() as cluster:
        expect_oracle(cluster, oracle, [prompt_of(40, seed)])
        cluster.wait_at_rest()
        before = cluster.resources()
        asked = []
        for i in range(60):
            prompt = prompt_of(rng.randint(1, 100), seed + i)
            key, answer = cluster.router.ask(prompt, FEW)
            asked.append((prompt, answer))
            if rng.random() < 0.34:
                if rng.random() < 0.5:
                    asked[rng.randrange(len(asked))][1].result()
                cluster.router.abort(key)
        for prompt, answer in asked:
            end = answer.result()
            assert end.failure is None, end
            if end.reason is not FinishReason.CANCELLED:
                assert answer.tokens == oracle.greedy(prompt, 4)
        cluster.wait_pages_returned()
        cluster.wait_at_rest()
        assert cluster.resources() == before


def test_what_comes_for_a_transfer_that_is_over_is_counted_and_dropped(
    tiny_model: Path, oracle: Oracle, seed: int
) -> None:
    """P14 on the data plane: late immediates of ended generations."""
    faults = Faults(stale_duplicates=3, reorder=True, max_delay=30)
    with Cluster(tiny_model, simulated(faults, seed), Shape()).start() as cluster:
        for i in range(4):
            expect_oracle(cluster, oracle, [prompt_of(40 + i, seed)])
        stale: TransferEngine = cluster.fabrics["decode-0"]
        assert stale.counters().stale_immediates > 0
