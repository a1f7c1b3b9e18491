"""Nodes of several engines: requests spread over them, and KV goes from any to the one that asked for it."""

from dataclasses import replace
from pathlib import Path

import pytest

from protocol.sampling import SamplingParams
from tests.nodes.conftest import open_named
from tests.nodes.crossing import HELD, Crossing, Facts, start_nodes
from tests.nodes.pair import Cluster, Shape
from tests.nodes.prompts import expect_oracle, prompt_of
from tests.oracle import Oracle


@pytest.mark.timeout(300)  # of a loaded machine: workers start anew
def test_two_ranks_prefill_for_two_engines(tiny_model: Path, oracle: Oracle, seed: int) -> None:
    """TP on the prefill side, two engines with requests of their own on the decode side. One node beside each, to have
    met prompts that the other has not."""
    alone = Shape(max_batch_tokens=40, num_blocks=128)
    sources, targets = [alone, replace(alone, tp=2)], [alone, replace(alone, dp=2)]
    with start_nodes(tiny_model, open_named("net"), sources, targets) as cluster:
        crossing = Crossing(cluster, oracle, Facts(layers=3, heads=4), source=1, target=1)
        crossing.expect_all([prompt_of(20 + 7 * i, seed) for i in range(8)])
        served = [engine.counters.tokens for engine in cluster.engines["decode-1"]]
        assert min(served) > 0, "one engine got nothing to do"
        for number, case in enumerate(("decode", "prefill", "both")):
            crossing.expect_lacking(HELD[case], prompt_of(HELD[case].length, seed + number))


@pytest.mark.slow
def test_prompts_spread_over_the_engines_of_a_prefill_node(tiny_model: Path, oracle: Oracle, seed: int) -> None:
    with Cluster(tiny_model, open_named("reordering", seed), Shape(max_batch_tokens=24)) as cluster:
        cluster.add_prefill(Shape(max_batch_tokens=24, dp=2))
        cluster.start(prefill=0)
        expect_oracle(cluster, oracle, [prompt_of(40 + i, seed) for i in range(6)])
        computed = [engine.counters.prompt_tokens for engine in cluster.engines["prefill-0"]]
        assert min(computed) > 0, "one engine got nothing to do"


@pytest.mark.slow
def test_what_is_cancelled_on_any_engine_comes_back_whole(tiny_model: Path, seed: int) -> None:
    endless = SamplingParams(max_new_tokens=300, ignore_eos=True)
    with Cluster(tiny_model, open_named("net"), Shape(dp=2)).start() as cluster:
        asked = [cluster.router.ask(prompt_of(30, seed + i), endless) for i in range(4)]
        for _, answer in asked:
            answer.wait_tokens(2)
        for request, _ in asked:
            cluster.router.abort(request)
        for _, answer in asked:
            answer.result()
        cluster.wait_pages_returned()
        cluster.wait_at_rest()
