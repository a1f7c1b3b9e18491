"""Nodes whose model is divided among processes: every pair of shardings gives the tokens of the whole model.

Debug mode is on: checksums of all pages are compared on arrival. Nodes of every shape stand side by side, and prompts
cross from each to each. The tiny model has 4 KV heads; of others several ranks hold the same heads.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from protocol.sampling import SamplingParams
from tests.nodes.conftest import open_named
from tests.nodes.corrupting import open_corrupting_decode
from tests.nodes.crossing import HELD, Crossing, Facts, start_nodes
from tests.nodes.pair import Cluster, Shape
from tests.nodes.prompts import prompt_of
from tests.oracle import Oracle
from tests.tiny_model import save_tiny_model

LAYERS, CHUNK = 3, 40
LENGTHS = (2, 17, 33, 65, 90)
PARALLEL = ("tp:1", "tp:2", "tp:4")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Fleet:
    """Nodes of one cluster. `pages`: of prefill and of decode nodes. `heads`: KV heads of the model."""

    fabric: str
    pages: tuple[int, int]
    heads: int = 4
    sources: tuple[str, ...] = PARALLEL
    targets: tuple[str, ...] = (*PARALLEL, "dp:2")

    def start(self, model: Path) -> Cluster:
        sources, targets = (
            [shape_of(name, page) for name in names]
            for names, page in zip((self.sources, self.targets), self.pages, strict=True)
        )
        return start_nodes(model, open_named(self.fabric), sources, targets)

    def __str__(self) -> str:
        """As a test's name has it."""
        return f"{self.fabric}-pages:{self.pages[0]}:{self.pages[1]}-heads:{self.heads}"


FLEETS = [Fleet(fabric, pages) for fabric in ("net", "reordering") for pages in ((16, 16), (16, 64), (64, 16))]
COPIES = [
    Fleet("net", (16, 16), 2),
    Fleet("reordering", (64, 16), 2),
    Fleet("reordering", (16, 16), 1, PARALLEL[:2], ("tp:2", "dp:2")),
]
"""Fewer KV heads than ranks. The last is what one latent vector for all heads looks like: every rank has all of it."""


def shape_of(name: str, page: int) -> Shape:
    kind, count = name.split(":")
    shape = Shape(page, 4096 // page, CHUNK)
    return replace(shape, tp=int(count)) if kind == "tp" else replace(shape, dp=int(count))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, Oracle]]:
    """By the number of their KV heads."""
    folders = {heads: tmp_path_factory.mktemp("tiny") for heads in (1, 2, 4)}
    return {n: (save_tiny_model(folder, kv_heads=n), Oracle(folder)) for n, folder in folders.items()}


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, models: dict[int, tuple[Path, Oracle]]) -> Iterator[tuple[Fleet, Cluster]]:
    fleet = request.param
    with fleet.start(models[fleet.heads][0]) as cluster:
        yield fleet, cluster


@pytest.mark.parametrize(
    ("started", "source", "target"),
    [(fleet, *pair) for fleet in FLEETS + COPIES for pair in itertools.product(fleet.sources, fleet.targets)],
    indirect=["started"],
    ids=str,
)
def test_every_pair_of_shardings(
    started: tuple[Fleet, Cluster], models: dict[int, tuple[Path, Oracle]], source: str, target: str, seed: int
) -> None:
    """Lengths at the edges of pages and chunks, and all that either side may hold beforehand."""
    fleet, cluster = started
    oracle, facts = models[fleet.heads][1], Facts(LAYERS, fleet.heads)
    crossing = Crossing(cluster, oracle, facts, fleet.sources.index(source), fleet.targets.index(target))
    crossing.expect_all([prompt_of(length, seed) for length in LENGTHS])
    for number, held in enumerate(HELD.values()):
        crossing.expect_lacking(held, prompt_of(held.length, seed + number))


@pytest.mark.parametrize("ranks", [(1, 2), (2, 2)], ids=str)
def test_a_flipped_byte_in_the_pages_of_one_rank_is_caught(tiny_model: Path, ranks: tuple[int, int], seed: int) -> None:
    source, target = (Shape(tp=tp) for tp in ranks)
    with start_nodes(tiny_model, open_corrupting_decode, [source], [target]) as cluster:
        _, answer = cluster.router.ask(prompt_of(50, seed), SamplingParams(max_new_tokens=4))
        failure = answer.result().failure
        assert failure is not None and "KV differs on arrival" in failure.message and answer.tokens == []
        cluster.wait_pages_returned()
