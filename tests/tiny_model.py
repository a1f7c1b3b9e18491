"""Tiny random models, with a byte-level tokenizer or without, as model folders: made, never fetched.

4 KV heads and an `initializer_range` of at least 0.1: at the usual 0.02 a zeroed page often leaves the greedy tokens
unchanged, and a test of the KV cache would see nothing.
"""

from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 101
WINDOW = 9
"""Of tiny models with sliding layers: neither a multiple nor a divisor of any page size."""
_SLIDING_FIRST = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
_SHORT_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16, "truncate": False}
_SCALED_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16, "mscale_all_dim": 4.0}
_LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3_moe": {**_EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "gemma2": {
        **_SLIDING_FIRST,
        "query_pre_attn_scalar": 4,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
    },
    "gemma3_text": {**_SLIDING_FIRST, "query_pre_attn_scalar": 4},
    "deepseek_v2": {**_LATENT, "q_lora_rank": None},
    "deepseek_v3": {**_LATENT, "rope_parameters": _SCALED_YARN},
    "gpt_oss": {**_SLIDING_FIRST, **_EXPERTS, "intermediate_size": 32, "rope_parameters": _SHORT_YARN},
}
"""What a family needs beside the common sizes, so that each of its peculiarities shows in the tokens."""
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
    """A float32 model of VOCAB tokens and three layers without a tokenizer and without an end token. `family`: a model
    type of transformers."""
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
    configs, auto = cast(Any, AutoConfig), cast(Any, AutoModelForCausalLM)
    config = configs.for_model(family, **{**sizes, **OF_FAMILY.get(family, {}), **settings})
    torch.manual_seed(seed)
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
