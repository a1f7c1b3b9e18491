"""Models that keep one latent vector of each token (MLA): it crosses like a single head without a V, and every rank of
a divided model has all of it. Of several source ranks one writes to each target rank.

Debug mode is on: checksums of all pages are compared on arrival.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from protocol.sampling import SamplingParams
from tests.nodes.conftest import open_named
from tests.nodes.corrupting import open_corrupting_decode
from tests.nodes.crossing import HELD, Crossing, Facts, start_nodes
from tests.nodes.pair import Cluster, Shape
from tests.nodes.prompts import prompt_of
from tests.oracle import Oracle
from tests.tiny_model import save_weights

LAYERS, VOCAB, CHUNK = 2, 265, 40
LENGTHS = (2, 17, 33, 65, 90)
FACTS = Facts(LAYERS, heads=1, parts=1)
SOURCES = {"tp:1": Shape(tp=1), "tp:2": Shape(tp=2)}
TARGETS = {**SOURCES, "dp:2": Shape(dp=2)}
PAGES = ((16, 16), (16, 64), (64, 16))


@dataclass(frozen=True)
class Served:
    folder: Path
    oracle: Oracle


@pytest.fixture(scope="module")
def deepseek_v3(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """One dense layer, and one with experts."""
    sizes = {"num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    folder = save_weights(tmp_path_factory.mktemp("deepseek"), "deepseek_v3", **sizes)
    return Served(folder, Oracle(folder))


def of_pages(shape: Shape, page: int) -> Shape:
    return Shape(page, 4096 // page, CHUNK, tp=shape.tp, dp=shape.dp)


@pytest.mark.parametrize(("fabric", "pages"), [("net", (16, 64)), ("reordering", (16, 16))], ids=str)
def test_tokens_are_those_of_the_model_alone(
    deepseek_v3: Served, fabric: str, pages: tuple[int, int], seed: int
) -> None:
    source, target = (of_pages(Shape(), page) for page in pages)
    with start_nodes(deepseek_v3.folder, open_named(fabric, seed), [source] * 2, [target] * 2) as cluster:
        crossing = Crossing(cluster, deepseek_v3.oracle, FACTS, source=1, target=1)
        crossing.expect_all([prompt_of(length, seed) for length in LENGTHS])
        for number, case in enumerate(("decode", "prefill", "both")):
            crossing.expect_lacking(HELD[case], prompt_of(HELD[case].length, seed + number))


@pytest.mark.slow
def test_a_flipped_byte_of_a_latent_vector_is_caught(deepseek_v3: Served, seed: int) -> None:
    with start_nodes(deepseek_v3.folder, open_corrupting_decode, [Shape()], [Shape()]) as cluster:
        _, answer = cluster.router.ask(prompt_of(50, seed), SamplingParams(max_new_tokens=4))
        failure = answer.result().failure
        assert failure is not None and "KV differs on arrival" in failure.message and answer.tokens == []
        cluster.wait_pages_returned()


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, deepseek_v3: Served) -> Iterator[Cluster]:
    fabric, (source_page, target_page) = request.param
    sources = [of_pages(shape, source_page) for shape in SOURCES.values()]
    targets = [of_pages(shape, target_page) for shape in TARGETS.values()]
    with start_nodes(deepseek_v3.folder, open_named(fabric), sources, targets) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("started", list(itertools.product(("net", "reordering"), PAGES)), indirect=True, ids=str)
def test_every_pair_of_shardings(started: Cluster, deepseek_v3: Served, source: str, target: str, seed: int) -> None:
    """Lengths at the edges of pages and chunks, and all that either side may hold beforehand."""
    numbers = list(SOURCES).index(source), list(TARGETS).index(target)
    crossing = Crossing(started, deepseek_v3.oracle, FACTS, *numbers)
    crossing.expect_all([prompt_of(length, seed) for length in LENGTHS])
    for number, held in enumerate(HELD.values()):
        crossing.expect_lacking(held, prompt_of(held.length, seed + number))
