"""Models with sliding layers: only the last window of a prompt crosses, into the same slots, and no token changes."""

from pathlib import Path

import pytest

from protocol.sampling import SamplingParams
from tests.nodes.conftest import open_named
from tests.nodes.pair import Cluster, Shape
from tests.nodes.prompts import prompt_of
from tests.nodes.unequal import cluster_of
from tests.oracle import Oracle
from tests.tiny_model import VOCAB, WINDOW, save_weights

NEW = 14
"""More than a window: the decode side goes around the ring as well."""
LENGTHS = [2, 3, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 2 * WINDOW + 1, 41, 120]
"""Prompts whose KV is shorter than the window, equal to it, and far longer."""
MODELS = {"gemma3_text": (1, 2), "mistral": (0, 3)}
"""Layers of full attention, sliding layers."""


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_weights(tmp_path_factory.mktemp(family), family, sliding_window=WINDOW)


@pytest.fixture(scope="module")
def exact(model: Path) -> Oracle:
    return Oracle(model)


def prompts(seed: int) -> list[list[int]]:
    return [[token % VOCAB for token in prompt_of(length, seed)] for length in LENGTHS]


def expect_exact(cluster: Cluster, exact: Oracle, asked: list[list[int]]) -> list[int]:
    """All at once; the writes that each took."""
    sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    answers = [cluster.router.ask(prompt, sampling)[1] for prompt in asked]
    writes = []
    for prompt, answer in zip(asked, answers, strict=True):
        writes.append(answer.result().ledger.writes)
        assert answer.tokens == exact.greedy(prompt, NEW), len(prompt)
    cluster.wait_pages_returned()
    return writes


@pytest.mark.parametrize("fabric", ["net", "reordering"])
@pytest.mark.parametrize(("page", "chunk"), [(4, 7), (16, 64)])
def test_prompts_shorter_than_the_window_equal_to_it_and_far_beyond(
    model: Path, family: str, exact: Oracle, fabric: str, page: int, chunk: int, seed: int
) -> None:
    full, sliding = MODELS[family]
    shape = Shape(page_size=page, num_blocks=1024 // page, max_batch_tokens=chunk)
    with Cluster(model, open_named(fabric, seed), shape).start() as cluster:
        asked = prompts(seed)
        for writes, prompt in zip(expect_exact(cluster, exact, asked), asked, strict=True):
            moved = len(prompt) - 1
            assert writes == full * -(-moved // page) + sliding * -(-min(moved, WINDOW) // page), moved


@pytest.mark.parametrize(("source_page", "target_page"), [(4, 16), (16, 4)])
def test_windows_cross_between_unequal_pages(
    model: Path, exact: Oracle, source_page: int, target_page: int, seed: int
) -> None:
    with cluster_of(model, open_named("reordering", seed), source_page, target_page) as cluster:
        expect_exact(cluster, exact, prompts(seed))


def test_a_request_that_is_cancelled_leaves_no_page_of_any_group_behind(model: Path, seed: int) -> None:
    with Cluster(model, open_named("net"), Shape(num_blocks=32, max_batch_tokens=16)).start() as cluster:
        request, answer = cluster.router.ask(prompts(seed)[-1], SamplingParams(max_new_tokens=200, ignore_eos=True))
        cluster.router.abort(request)
        answer.result()
        cluster.wait_pages_returned()
