"""Tiny models of every kind that is served, prompts for them, and the oracle's tokens."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tests.oracle import Oracle
from tests.tiny_model import VOCAB, WINDOW

_oracle = lru_cache(maxsize=4)(Oracle)


@dataclass(frozen=True)
class Kind:
    """`types`: of its three layers, "f" for full attention and "s" for sliding."""

    family: str
    types: str = "fff"
    settings: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "llama": Kind("llama"),
    "mistral": Kind("mistral"),
    "mistral-sliding": Kind("mistral", "sss", {"sliding_window": WINDOW}),
    "ministral": Kind("ministral", "sss", {"sliding_window": WINDOW}),
    "qwen2": Kind("qwen2"),
    "qwen2-sliding": Kind(
        "qwen2", "ffs", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    ),
    "qwen3": Kind("qwen3"),
    "qwen3-moe": Kind("qwen3_moe"),
    "deepseek-v2": Kind("deepseek_v2"),
    "deepseek-v3": Kind("deepseek_v3"),
    "gemma2": Kind("gemma2", "ssf"),
    "gemma3": Kind("gemma3_text", "ssf"),
    "gpt-oss": Kind("gpt_oss", "ssf"),
}


def greedy(directory: Path, prompt: list[int], count: int) -> list[int]:
    """Tokens that transformers' own `generate` gives."""
    return _oracle(directory).greedy(prompt, count)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids, the same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


NEW = 12
"""Tokens that each of WINDOW_PROMPTS is continued by."""
WINDOW_PROMPTS = {
    "A": prompt_of(WINDOW - 2),
    "B": prompt_of(WINDOW + 5),
    "C": prompt_of(3 * WINDOW),
}
"""A crosses the window while it decodes, B and C during prefill."""


def continued(directory: Path) -> dict[str, list[int]]:
    """The oracle's tokens of WINDOW_PROMPTS."""
    return {name: greedy(directory, prompt, NEW) for name, prompt in WINDOW_PROMPTS.items()}
