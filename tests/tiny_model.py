"""Tiny random models, with a byte-level tokenizer or without, as model folders: made, never fetched.

4 KV heads and an `initializer_range` of at least 0.1: at the usual 0.02 a zeroed page often leaves the greedy tokens
unchanged, and a test of the KV cache would see nothing.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 101
CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SPECIALS = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny_model(folder: Path, layers: int = 3, seed: int = 0, context: int = 4096, kv_heads: int = 4) -> Path:
    """A Llama with the byte tokenizer: saves both into `folder` and returns it."""
    tokenizer = byte_tokenizer()
    save_weights(
        folder,
        seed=seed,
        vocab_size=len(tokenizer),
        intermediate_size=128,
        num_hidden_layers=layers,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        initializer_range=0.1,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|end|>"),
        pad_token_id=0,
    )
    tokenizer.save_pretrained(folder)
    return folder


def save_weights(folder: Path, family: str = "llama", seed: int = 7, **settings: Any) -> Path:
    """A float32 model of VOCAB tokens without a tokenizer and without an end token."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "mistral":
        sizes["sliding_window"] = None
    config = CONFIGS[family](**{**sizes, **settings})
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and a few special ones."""
    vocabulary = {token: index for index, token in enumerate(SPECIALS)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )
