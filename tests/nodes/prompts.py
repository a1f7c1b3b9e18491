"""Prompts for a cluster of real nodes, and the answers that they must have."""

import random

from protocol.messages import FinishReason, RequestEnded
from protocol.sampling import SamplingParams
from tests.nodes.pair import Cluster
from tests.oracle import Oracle

NEW_TOKENS = 6
END = 1
"""The tiny tokenizer's end token."""


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(5, 261) for _ in range(length)]


def expect_oracle(cluster: Cluster, oracle: Oracle, prompts: list[list[int]]) -> list[RequestEnded]:
    """All at once; every answer equals the oracle's, and every page comes back."""
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS)
    asked = [cluster.router.ask(prompt, sampling)[1] for prompt in prompts]
    ends = [answer.result() for answer in asked]
    for prompt, answer, end in zip(prompts, asked, ends, strict=True):
        expected = oracle.greedy(prompt, NEW_TOKENS)
        assert answer.tokens == expected, (len(prompt), end)
        assert end.reason is (FinishReason.STOP if expected[-1] == END else FinishReason.LENGTH)
    cluster.wait_pages_returned()
    return ends
