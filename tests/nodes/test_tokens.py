"""Prefill and decode nodes together produce the tokens of transformers' own `generate`, whatever lies between.

Debug mode is on in all of these: freed pages are poisoned, and every page's checksum is compared on arrival.
"""

import random
from pathlib import Path

import pytest

from protocol.messages import FinishReason
from protocol.sampling import SamplingParams
from tests.nodes.conftest import open_named
from tests.nodes.corrupting import open_corrupting_decode
from tests.nodes.pair import Cluster, OpenFabric, Shape
from tests.nodes.prompts import expect_oracle, prompt_of
from tests.oracle import Oracle

CHUNK = 64


def edges(page: int) -> list[int]:
    return sorted({1, 2, page - 1, page, page + 1, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2, 3 * CHUNK + 7})


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_lengths_at_every_edge(
    tiny_model: Path, oracle: Oracle, open_fabric: OpenFabric, page_size: int, seed: int
) -> None:
    shape = Shape(page_size=page_size, num_blocks=2048 // page_size, max_batch_tokens=CHUNK)
    with Cluster(tiny_model, open_fabric, shape).start() as cluster:
        prompts = [prompt_of(length, seed) for length in edges(page_size)]
        for end, prompt in zip(expect_oracle(cluster, oracle, prompts), prompts, strict=True):
            pages = -(-(len(prompt) - 1) // page_size)
            assert end.ledger.writes == pages * 3, len(prompt)
            assert end.ledger.prefill_node == ("prefill-0" if len(prompt) > 1 else "")


def test_eight_at_once(tiny_model: Path, oracle: Oracle, open_fabric: OpenFabric, seed: int) -> None:
    with Cluster(tiny_model, open_fabric, Shape(max_batch_tokens=32)).start() as cluster:
        rng = random.Random(seed)
        expect_oracle(cluster, oracle, [prompt_of(rng.randint(2, 90), seed + i) for i in range(8)])


def test_a_node_alone_with_local_prefill_gives_the_same_tokens(tiny_model: Path, oracle: Oracle, seed: int) -> None:
    with Cluster(tiny_model, open_named("net"), Shape()).start(prefill=0, local=True) as cluster:
        ends = expect_oracle(cluster, oracle, [prompt_of(length, seed) for length in edges(16)])
        assert all(end.ledger.writes == 0 and end.ledger.prefill_node == "" for end in ends)


@pytest.mark.parametrize("chunk", [1, 3, 15, 16, 17, 10_000])
def test_every_chunk_size_works(tiny_model: Path, oracle: Oracle, chunk: int, seed: int) -> None:
    with Cluster(tiny_model, open_named("net"), Shape(max_batch_tokens=chunk)).start() as cluster:
        (end,) = expect_oracle(cluster, oracle, [prompt_of(40, seed)])
        assert end.ledger.prefill_chunks == -(-39 // chunk)


def test_seeded_sampling_does_not_depend_on_where_the_prompt_ran(tiny_model: Path, seed: int) -> None:
    prompts = [prompt_of(length, seed) for length in (5, 40, 70)]
    sampling = SamplingParams(max_new_tokens=12, temperature=0.9, top_p=0.8, seed=seed)
    outputs = []
    for prefill, local in ((1, False), (0, True)):
        with Cluster(tiny_model, open_named("net"), Shape()).start(prefill=prefill, local=local) as cluster:
            asked = [cluster.router.ask(prompt, sampling)[1] for prompt in prompts]
            assert all(answer.result().failure is None for answer in asked)
            outputs.append([answer.tokens for answer in asked])
    assert outputs[0] == outputs[1]


def test_a_flipped_byte_on_the_decode_side_is_caught(tiny_model: Path, seed: int) -> None:
    """The planted corruption: one byte of one arrived page, before the request may read it."""
    with Cluster(tiny_model, open_corrupting_decode, Shape()).start() as cluster:
        _, answer = cluster.router.ask(prompt_of(50, seed), SamplingParams(max_new_tokens=4))
        end = answer.result()
        assert end.reason is FinishReason.ERROR and answer.tokens == []
        assert end.failure is not None and "KV differs on arrival" in end.failure.message
        cluster.wait_pages_returned()
