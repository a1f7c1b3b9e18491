"""Tiny random models in a directory, and transformers' own greedy tokens of them: the oracle."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

VOCAB = 101
MAX_POSITIONS = 512
CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def save_tiny_model(directory: Path, family: str = "llama", seed: int = 7, **changes: Any) -> Path:
    """Float32, 4 KV heads, 8 query heads, weights wide enough that a wrong page changes tokens. No end token."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "mistral":
        settings["sliding_window"] = None
    config = CONFIGS[family](**{**settings, **changes})
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    auto.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


@lru_cache(maxsize=4)
def _oracle(directory: Path) -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@lru_cache(maxsize=1024)
def _generate(directory: Path, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = _oracle(directory).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return tuple(output[0, len(prompt) :].tolist())


def greedy(directory: Path, prompt: list[int], count: int) -> list[int]:
    """Tokens that transformers' own `generate` gives."""
    return list(_generate(directory, tuple(prompt), count))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids, the same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()
