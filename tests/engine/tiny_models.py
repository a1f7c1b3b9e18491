"""Prompts for the tiny models without a tokenizer, and the oracle's tokens of them."""

from functools import lru_cache
from pathlib import Path

import torch

from tests.oracle import Oracle
from tests.tiny_model import VOCAB

_oracle = lru_cache(maxsize=4)(Oracle)


def greedy(directory: Path, prompt: list[int], count: int) -> list[int]:
    """Tokens that transformers' own `generate` gives."""
    return _oracle(directory).greedy(prompt, count)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids, the same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()
