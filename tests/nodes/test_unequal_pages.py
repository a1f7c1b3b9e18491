"""Pages of other sizes on the two sides: the same tokens, and every token's bytes where the decode side looks for them.

Debug mode is on: checksums, which do not depend on page sizes, are compared on arrival.
"""

from pathlib import Path

import pytest

from tests.nodes.crossing import runs
from tests.nodes.pair import OpenFabric
from tests.nodes.prompts import expect_oracle, prompt_of
from tests.nodes.unequal import cluster_of
from tests.oracle import Oracle

LAYERS, HEADS, PARTS = 3, 4, 2


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
