"""Prompts that the prefill node, the decode node or both have seen a part of: only what is lacking is computed and
crosses, whatever the pages' sizes, and no token changes. (Among nodes of any number of ranks: test_tensor_parallel.)
"""

from pathlib import Path

import pytest

from tests.nodes.conftest import open_named
from tests.nodes.crossing import HELD, Crossing, Facts, start_nodes
from tests.nodes.pair import Shape
from tests.nodes.prompts import prompt_of
from tests.oracle import Oracle

TINY = Facts(layers=3, heads=4)


@pytest.mark.parametrize(("fabric", "pages"), [("net", (16, 16)), ("net", (64, 16)), ("reordering", (16, 64))], ids=str)
def test_what_either_side_holds_of_a_prompt_neither_crosses_nor_is_computed(
    tiny_model: Path, oracle: Oracle, fabric: str, pages: tuple[int, int], seed: int
) -> None:
    source, target = (Shape(page, 4096 // page, 40) for page in pages)
    with start_nodes(tiny_model, open_named(fabric, seed), [source] * 2, [target] * 2) as cluster:
        crossing = Crossing(cluster, oracle, TINY, source=1, target=1)
        for number, held in enumerate(HELD.values()):
            crossing.expect_lacking(held, prompt_of(held.length, seed + number))
