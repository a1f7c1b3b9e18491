"""Contexts that come with a prompt's KV are transformers' own, wherever the prompt was computed; no slot is lost."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from decode_node.node import DecodeNode
from engine.contexts import Context
from engine.engine import Engine
from engine.outputs import StepOutput
from prefill_node.node import PrefillNode
from protocol.context import ContextName
from protocol.gates import GateClient
from protocol.ledger import Ledger
from protocol.messages import FailureCode, FinishReason
from protocol.sampling import SamplingParams
from tests.nodes.conftest import open_named
from tests.nodes.pair import Cluster, Shape
from tests.nodes.prompts import prompt_of
from tests.oracle import Oracle

BOTH: tuple[ContextName, ...] = ("hidden", "logits")
LAYERS, PAGE, CHUNK = 3, 16, 40
DEADLINE_S = 30.0
FEW = SamplingParams(max_new_tokens=4, ignore_eos=True)
HELD_WHOLE = prompt_of(2 * PAGE + 1, seed=5)


def shape(context: tuple[ContextName, ...] = BOTH, num_blocks: int = 64, **sizes: int) -> Shape:
    sizes = {"max_batch_tokens": CHUNK, "tp": 1, "dp": 1, **sizes}
    return Shape(PAGE, num_blocks, sizes["max_batch_tokens"], tp=sizes["tp"], dp=sizes["dp"], context=context)


class Watched:
    """A cluster of one decode node, and the contexts that its engines have when they report a first token."""

    def __init__(self, cluster: Cluster, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster = cluster
        self._oracle = oracle
        self._kept: dict[str, Context | None] = {}
        for seat, engine in zip(cluster.decode[0]._seats, cluster.engines["decode-0"], strict=True):
            monkeypatch.setattr(seat.admission, "on_step", partial(self._look, engine, seat.admission.on_step))

    def ask(self, *prompts: list[int], parts: tuple[ContextName, ...] = BOTH) -> list[Ledger]:
        """All at once; every one has its context, and nothing is held any more."""
        asked = [self.cluster.router.ask(prompt, FEW) for prompt in prompts]
        ends = [answer.result() for _, answer in asked]
        for (request, _), end, prompt in zip(asked, ends, prompts, strict=True):
            assert end.reason is FinishReason.LENGTH, end
            expect_close(self._kept[request], self._oracle, prompt, parts)
        expect_at_rest(self.cluster)
        return [end.ledger for end in ends]

    def _look(self, engine: Engine, on_step: Callable[[StepOutput], None], output: StepOutput) -> None:
        """On the engine's thread."""
        for new in output.tokens:
            if new.request_id not in self._kept:
                self._kept[new.request_id] = engine.context(new.request_id)
        on_step(output)


Watch = Callable[[Cluster], Watched]


@pytest.fixture
def watch(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> Watch:
    return lambda cluster: Watched(cluster, oracle, monkeypatch)


def expect_close(context: Context | None, oracle: Oracle, prompt: list[int], parts: tuple[ContextName, ...]) -> None:
    assert context is not None
    for name, expected in zip(BOTH, oracle.context(prompt), strict=True):
        value = getattr(context, name)
        assert (value is not None) == (name in parts)
        if value is not None:
            torch.testing.assert_close(value, expected, atol=1e-4, rtol=1e-4)


def expect_at_rest(cluster: Cluster) -> None:
    """Slots too."""
    cluster.wait_pages_returned()
    cluster.wait_at_rest()
    nodes: list[PrefillNode | DecodeNode] = [*cluster.prefill, *cluster.decode]
    for node, engines in zip(nodes, cluster.engines.values(), strict=True):
        slots = [engine._cache.contexts for engine in engines]
        assert node.resources()["context_slots_free"] == sum(s.count for s in slots if s)


@pytest.mark.parametrize("fabric", ["net", "reordering"])
def test_they_arrive_with_prompts_of_any_length(tiny_model: Path, watch: Watch, fabric: str, seed: int) -> None:
    lengths = [2, PAGE, PAGE + 1, PAGE + 2, 3 * CHUNK + 7]
    with Cluster(tiny_model, open_named(fabric, seed), shape()).start() as cluster:
        ledgers = watch(cluster).ask(*(prompt_of(length, seed) for length in lengths))
        assert [ledger.writes for ledger in ledgers] == [-(-(n - 1) // PAGE) * LAYERS + 2 for n in lengths]


def test_a_decode_node_gets_the_part_that_it_wants_of_a_node_that_keeps_both(
    tiny_model: Path, watch: Watch, seed: int
) -> None:
    with Cluster(tiny_model, open_named("reordering", seed), shape(("logits",))) as cluster:
        cluster.add_prefill(shape())
        cluster.start(prefill=0)
        (ledger,) = watch(cluster).ask(prompt_of(20, seed), parts=("logits",))
        assert ledger.writes == 2 * LAYERS + 1


def test_more_prompts_than_slots_wait_for_one_another(tiny_model: Path, watch: Watch, seed: int) -> None:
    """A slot for each request that a forward may hold: two."""
    with Cluster(tiny_model, open_named("net"), shape(max_batch_tokens=2)).start() as cluster:
        assert [held["context_slots_free"] for held in cluster.resources()] == [2, 2]
        watch(cluster).ask(*(prompt_of(n, seed) for n in (2, 5, 18, 9, 20)))


def test_what_the_decode_node_holds_changes_nothing(tiny_model: Path, watch: Watch, seed: int) -> None:
    longer = [*HELD_WHOLE, *prompt_of(30, seed)]
    with Cluster(tiny_model, open_named("net"), shape()).start() as cluster:
        watched = watch(cluster)
        assert watched.ask(HELD_WHOLE)[0].writes == 2 * LAYERS + 2
        (again,) = watched.ask(HELD_WHOLE)
        assert (again.writes, again.prefill_node) == (0, ""), "held whole here: nobody is asked"
        assert watched.ask(longer)[0].writes == 2 * LAYERS + 2, "of four pages two are here"


@pytest.mark.parametrize("small", ["prefill", "decode"])
def test_a_prompt_that_one_side_alone_still_holds(tiny_model: Path, watch: Watch, small: str, seed: int) -> None:
    """The other side's pool is so small that another prompt drives the first one out of it."""
    roomy, tight = shape(), shape(num_blocks=7)
    with Cluster(tiny_model, open_named("net"), roomy) as cluster:
        cluster.add_prefill(tight if small == "prefill" else roomy)
        cluster.add_decode(shape=tight if small == "decode" else roomy)
        cluster.start(prefill=0, decode=0)
        watched = watch(cluster)
        watched.ask(HELD_WHOLE)
        watched.ask(prompt_of(100, seed))
        (again,) = watched.ask(HELD_WHOLE)
        assert again.writes == (2 * LAYERS + 2 if small == "decode" else 0)


def test_a_node_alone_computes_them_itself(tiny_model: Path, watch: Watch, seed: int) -> None:
    with Cluster(tiny_model, open_named("net"), shape()).start(prefill=0, local=True) as cluster:
        watched = watch(cluster)
        watched.ask(HELD_WHOLE, *(prompt_of(length, seed) for length in (2, PAGE + 1, 90)))
        watched.ask(HELD_WHOLE)


def test_an_abort_before_it_was_sent_gives_the_slots_back(tiny_model: Path, watch: Watch, tmp_path: Path) -> None:
    context = f"xfer:layer={LAYERS}"
    with Cluster(tiny_model, open_named("net"), shape(), gates=tmp_path).start() as cluster:
        gate = GateClient(str(tmp_path / "prefill-0"))
        gate.hold(context)
        request, answer = cluster.router.ask(HELD_WHOLE, FEW)
        assert gate.reached(context, DEADLINE_S)
        assert [held["context_slots_free"] for held in cluster.resources()] == [15, 15], "of 16"
        cluster.router.abort(request)
        assert answer.result().reason is FinishReason.CANCELLED
        gate.release(context)
        gate.close()
        expect_at_rest(cluster)
        watch(cluster).ask(HELD_WHOLE)


def test_a_prefill_node_that_does_not_keep_them_is_refused_with_what_to_do(tiny_model: Path) -> None:
    with Cluster(tiny_model, open_named("net"), shape()) as cluster:
        cluster.add_prefill(shape(()))
        cluster.start(prefill=0)
        failure = cluster.router.ask(HELD_WHOLE, FEW)[1].result().failure
        assert failure is not None and failure.code is FailureCode.INCOMPATIBLE
        assert "start it with --context hidden,logits" in failure.message
        expect_at_rest(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["net", "reordering"])
def test_two_ranks_compute_them_for_one(tiny_model: Path, watch: Watch, fabric: str, seed: int) -> None:
    with Cluster(tiny_model, open_named(fabric, seed), shape()) as cluster:
        cluster.add_prefill(shape(tp=2))
        cluster.start(prefill=0)
        watch(cluster).ask(*(prompt_of(length, seed) for length in (2, PAGE + 1, 90)))


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_any_engine_of_a_node_has_them(tiny_model: Path, watch: Watch, local: bool, seed: int) -> None:
    """The second engines run in workers."""
    with Cluster(tiny_model, open_named("net"), shape(dp=2)).start(prefill=0 if local else 1, local=local) as cluster:
        watch(cluster).ask(*(prompt_of(30 + n, seed) for n in range(4)))
        for engines in cluster.engines.values():
            assert min(engine.counters.batches for engine in engines) > 0, "one engine got nothing to do"
