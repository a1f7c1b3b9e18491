"""Which model families this engine computes correctly, and why it refuses the others.

Everything is read as the family's own code in transformers reads it, not as the field's name suggests.
"""

from typing import Any, Literal, NamedTuple

from engine.errors import UnsupportedModel
from engine.geometry import AttentionType, group_layers

LATENT = ("deepseek_v2", "deepseek_v3")
"""Multi-head latent attention (MLA): of each token one vector is kept, from which K and V of all heads are made."""
ONE_TYPE = (*LATENT, "llama", "mistral", "qwen3_moe")
"""All layers attend alike: these families' code has no layer types."""
TYPE_PER_LAYER = ("gemma2", "gemma3_text", "gpt_oss", "ministral", "qwen2", "qwen3")
FAMILIES = tuple(sorted(ONE_TYPE + TYPE_PER_LAYER))
_ROPE_BY_LENGTH = ("dynamic", "longrope")


def check_supported(config: Any) -> None:
    """`config`: a transformers configuration. Raises UnsupportedModel with the reason."""
    for check in (_family, _quantized, _layer_types, _window, _direction, _rope):
        if reason := check(config):
            raise UnsupportedModel(f"model of type {config.model_type!r} cannot be served: {reason}")
    group_layers(config.num_hidden_layers, layer_types(config), window(config))


def layer_types(config: Any) -> tuple[str, ...] | None:
    """Of a supported model; None where all layers are of one type."""
    return tuple(config.layer_types) if config.model_type in TYPE_PER_LAYER else None


def window(config: Any) -> int | None:
    """Of a supported model's sliding layers, in tokens, the query's own included. Where a family lets its window be
    switched off (`use_sliding_window`), its configuration has already done so."""
    return getattr(config, "sliding_window", None)


class KVShape(NamedTuple):
    """What is kept of a token in one layer: `parts` (K and V, or a latent vector) of `heads` heads of `dim`
    dimensions."""

    parts: Literal[1, 2]
    heads: int
    dim: int


def kv_shape(config: Any) -> KVShape:
    """Of a supported model as a whole. What a family that keeps latents calls head_dim is their rotary part."""
    if config.model_type in LATENT:
        return KVShape(parts=1, heads=1, dim=config.kv_lora_rank + config.qk_rope_head_dim)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVShape(parts=2, heads=config.num_key_value_heads, dim=dim)


def _family(config: Any) -> str | None:
    if config.model_type in FAMILIES:
        return None
    text = getattr(config, "text_config", None)
    if text is not None and text.model_type in FAMILIES:
        return f"it is multimodal, only text models are: its text part alone, of type {text.model_type!r}, could be"
    return f"its family is not one of {', '.join(FAMILIES)}"


def _quantized(config: Any) -> str | None:
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    return f"its weights are quantized ({method}), only plain ones are supported: save it dequantized"


def _layer_types(config: Any) -> str | None:
    types = set(getattr(config, "layer_types", None) or ())
    other = sorted(types - set(AttentionType))
    if other:
        return f"it has layers of type {', '.join(other)}, only {' and '.join(AttentionType)} are supported"
    if config.model_type in ONE_TYPE and AttentionType.SLIDING in types:
        return "it names layers of type sliding_attention, which its family's code would not heed"
    return None


def _window(config: Any) -> str | None:
    tokens = window(config)
    if tokens is not None and tokens < 1:
        return f"it names a sliding window of {tokens} tokens: a query sees at least itself"
    if config.model_type == "llama" and tokens:
        return f"it names a sliding window of {tokens} tokens, which its family's code would not heed"
    return None


def _direction(config: Any) -> str | None:
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention is bidirectional: a token's KV would depend on those that come after it"
    return None


def _rope(config: Any) -> str | None:
    """Gemma 3 has one set of parameters for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [parameters] if "rope_type" in parameters else [each for each in parameters.values() if each]
    for each in sets:
        if each["rope_type"] in _ROPE_BY_LENGTH:
            return (
                f"rotary scaling {each['rope_type']!r} depends on the length of the batch, "
                "so KV in pages would not stay valid"
            )
    return None
