"""Nodes whose model is divided among processes: every pair of shardings gives the tokens of the whole model.

Checksums are compared on arrival. The tiny model has 4 KV heads; `copies` has fewer than there are ranks.
"""

from pathlib import Path

import pytest

from protocol.messages import RequestEnded
from tests.nodes.conftest import open_named
from tests.nodes.pair import Cluster, Shape
from tests.nodes.test_tokens import expect_oracle, prompt_of
from tests.oracle import Oracle
from tests.tiny_model import save_tiny_model

LAYERS, HEADS, PARTS = 3, 4, 2
LENGTHS = (2, 17, 33, 90)


def serve(
    model: Path, oracle: Oracle, fabric: str, ranks: tuple[int, int], pages: tuple[int, int], seed: int
) -> list[RequestEnded]:
    source, target = (Shape(page, 1024 // page, 40, tp=tp) for page, tp in zip(pages, ranks, strict=True))
    with Cluster(model, open_named(fabric, seed), target) as cluster:
        cluster.add_prefill(source)
        cluster.start(prefill=0)
        return expect_oracle(cluster, oracle, [prompt_of(length, seed) for length in LENGTHS])


def expected_writes(ranks: tuple[int, int]) -> list[int]:
    """With pages of 16 on both sides: each pair of ranks that share heads moves every page of every layer once."""
    return [-(-(length - 1) // 16) * LAYERS * max(ranks) for length in LENGTHS]


@pytest.mark.slow
def test_two_ranks_prefill_for_one(tiny_model: Path, oracle: Oracle, seed: int) -> None:
    ends = serve(tiny_model, oracle, "net", (2, 1), (16, 16), seed)
    assert [end.ledger.writes for end in ends] == expected_writes((2, 1))


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["net", "reordering"])
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (4, 1), (1, 4)], ids=str)
def test_every_pair_of_shardings(
    tiny_model: Path, oracle: Oracle, fabric: str, ranks: tuple[int, int], seed: int
) -> None:
    ends = serve(tiny_model, oracle, fabric, ranks, (16, 16), seed)
    assert [end.ledger.writes for end in ends] == expected_writes(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("pages", [(16, 64), (64, 16)], ids=str)
def test_unequal_pages_over_unequal_ranks(tiny_model: Path, oracle: Oracle, pages: tuple[int, int], seed: int) -> None:
    serve(tiny_model, oracle, "reordering", (2, 1), pages, seed)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(4, 2), (2, 4), (4, 1)], ids=str)
def test_heads_that_several_ranks_hold(tmp_path: Path, ranks: tuple[int, int], seed: int) -> None:
    copies = save_tiny_model(tmp_path, kv_heads=2)
    ends = serve(copies, Oracle(copies), "reordering", ranks, (16, 16), seed)
    sets, pairs = max(1, ranks[1] // 2), 2
    assert [end.ledger.writes for end in ends] == [-(-(n - 1) // 16) * LAYERS * sets * pairs for n in LENGTHS]
