"""Token budgets of any size on the prefill side: each works or is refused at start, and none starves anybody."""

from pathlib import Path

import pytest

from tests.nodes.conftest import open_named
from tests.nodes.pair import Cluster, Shape
from tests.nodes.prompts import expect_oracle, prompt_of
from tests.oracle import Oracle

PAGE = 16


@pytest.mark.parametrize("budget", [1, 3, PAGE - 1, PAGE + 1, 1 << 14])
def test_p36_a_budget_that_fits_no_page_starves_nobody(
    tiny_model: Path, oracle: Oracle, budget: int, seed: int
) -> None:
    shape = Shape(page_size=PAGE, max_batch_tokens=budget)
    with Cluster(tiny_model, open_named("net"), shape).start() as cluster:
        prompts = [prompt_of(length, seed + length) for length in (2, PAGE, PAGE + 1, 40)]
        for end, prompt in zip(expect_oracle(cluster, oracle, prompts), prompts, strict=True):
            assert end.ledger.prefill_chunks >= -(-(len(prompt) - 1) // budget)
        cluster.wait_pages_returned()


@pytest.mark.parametrize("budget", [0, -5])
def test_p36_a_budget_of_nothing_is_refused_before_the_start(tiny_model: Path, budget: int) -> None:
    with pytest.raises(ValueError, match="max_batch_tokens"):
        Shape(max_batch_tokens=budget).options(tiny_model, 64)


def test_p37_many_prompts_in_small_slices_are_each_computed_once(tiny_model: Path, oracle: Oracle, seed: int) -> None:
    """A slice ends where the budget does: a prompt takes as many as its length asks for, and one more where it begins
    in what another one has left."""
    budget, length = 32, 150
    shape = Shape(page_size=PAGE, num_blocks=256, max_batch_tokens=budget)
    with Cluster(tiny_model, open_named("net"), shape).start() as cluster:
        prompts = [prompt_of(length, seed + i) for i in range(24)]
        least = -(-(length - 1) // budget)
        for end in expect_oracle(cluster, oracle, prompts):
            assert least <= end.ledger.prefill_chunks <= least + 1
            assert end.ledger.attempts == 1
        computed = cluster.engines["prefill-0"][0].counters.prompt_tokens
        assert computed == len(prompts) * (length - 1)
        cluster.wait_pages_returned()
