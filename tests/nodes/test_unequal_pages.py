"""Pages of other sizes on the two sides: the same tokens, and every token's bytes where the decode side looks for them.

Debug mode is on: checksums, which do not depend on page sizes, are compared on arrival.
"""

from pathlib import Path

import pytest

from protocol.messages import Ledger
from protocol.sampling import SamplingParams
from tests.nodes.conftest import open_named
from tests.nodes.pair import Cluster, OpenFabric, Shape
from tests.nodes.test_tokens import expect_oracle, prompt_of
from tests.oracle import Oracle

LAYERS, HEADS, PARTS, NEW = 3, 4, 2, 5
TOKENS = 1024


def cluster_of(model: Path, open_fabric: OpenFabric, source_page: int, target_page: int, chunk: int = 40) -> Cluster:
    source, target = (Shape(page, TOKENS // page, chunk) for page in (source_page, target_page))
    cluster = Cluster(model, open_fabric, target)
    cluster.add_prefill(source)
    return cluster.start(prefill=0)


def runs(source_page: int, target_page: int, tokens: int, first: int = 0) -> int:
    """Stretches of tokens that no page of either side cuts."""
    cuts = {position for position in range(first, tokens) if not position % source_page or not position % target_page}
    return len(cuts | {first})


@pytest.mark.parametrize(("source_page", "target_page"), [(16, 64), (64, 16), (48, 64)])
def test_lengths_around_the_pages_of_either_side(
    tiny_model: Path, oracle: Oracle, open_fabric: OpenFabric, source_page: int, target_page: int, seed: int
) -> None:
    edges = sorted({2, 3, *(page + by for page in (source_page, target_page) for by in (0, 1, 2)), 131})
    with cluster_of(tiny_model, open_fabric, source_page, target_page) as cluster:
        prompts = [prompt_of(length, seed) for length in edges]
        for end, prompt in zip(expect_oracle(cluster, oracle, prompts), prompts, strict=True):
            moved = len(prompt) - 1
            assert end.ledger.writes == runs(source_page, target_page, moved) * LAYERS * HEADS * PARTS, moved
            assert end.ledger.attempts == 1


def ask(cluster: Cluster, oracle: Oracle, prompt: list[int]) -> Ledger:
    _, answer = cluster.router.ask(prompt, SamplingParams(max_new_tokens=NEW))
    end = answer.result()
    assert end.failure is None and answer.tokens == oracle.greedy(prompt, NEW)
    cluster.wait_pages_returned()
    return end.ledger


@pytest.mark.parametrize(("source_page", "target_page", "held"), [(16, 64, 64), (64, 16, 80)])
def test_prefixes_are_counted_in_the_pages_of_the_side_that_holds_them(
    tiny_model: Path, oracle: Oracle, source_page: int, target_page: int, held: int, seed: int
) -> None:
    first = prompt_of(90, seed)
    longer = [*first, *prompt_of(40, seed + 1)]
    with cluster_of(tiny_model, open_named("net"), source_page, target_page) as cluster:
        ask(cluster, oracle, first)
        computed = cluster.engines["prefill-0"][0].counters.prompt_tokens
        ledger = ask(cluster, oracle, longer)
        assert ledger.writes == runs(source_page, target_page, 129, held) * LAYERS * HEADS * PARTS
        computed = cluster.engines["prefill-0"][0].counters.prompt_tokens - computed
        assert computed == 129 - 89 // source_page * source_page
