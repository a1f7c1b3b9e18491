"""Lengths, chunks and pages in every combination that has gone wrong elsewhere (P33-P35), by seeded sample.

Debug mode is on: a page sent before it is complete, or twice, differs from its source's checksum or breaks a poison.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.conftest import open_named
from tests.nodes.pair import Cluster, Shape
from tests.nodes.prompts import expect_oracle, prompt_of
from tests.oracle import Oracle

PER_COMBINATION = 38
"""8 combinations of chunk and page: 304 cases."""


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("chunk", [8, 16, 24, 64])
def test_sampled_lengths_for_every_chunk_and_page(
    tiny_model: Path, oracle: Oracle, chunk: int, page_size: int, seed: int
) -> None:
    """P35, and P33 (1, 2, page - 1, page, page + 1 are always among them)."""
    always = [1, 2, page_size - 1, page_size, page_size + 1]
    lengths = always + random.Random(seed).choices(range(1, 71), k=PER_COMBINATION - len(always))
    shape = Shape(page_size=page_size, num_blocks=1024 // page_size, max_batch_tokens=chunk)
    with Cluster(tiny_model, open_named("net"), shape).start() as cluster:
        prompts = [prompt_of(length, seed + i) for i, length in enumerate(lengths)]
        for end, prompt in zip(expect_oracle(cluster, oracle, prompts), prompts, strict=True):
            assert end.ledger.writes == -(-(len(prompt) - 1) // page_size) * 3
            assert end.ledger.attempts == 1


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> Iterator[Cluster]:
    """8 pages of 16 tokens on each side."""
    with Cluster(tiny_model, open_named("net"), Shape(num_blocks=8)).start() as cluster:
        yield cluster


@pytest.mark.parametrize("pages", [1, 2, 3, 4])
@pytest.mark.parametrize("extra", [0, 1])
def test_exact_page_boundaries(small: Cluster, oracle: Oracle, pages: int, extra: int, seed: int) -> None:
    """P34: a prompt of k pages; with `extra`, the first sampled token opens the next page on the decode side."""
    expect_oracle(small, oracle, [prompt_of(pages * 16 + extra, seed)])
