"""Which model families this engine computes correctly, and why it refuses the others."""

from typing import Any

from engine.errors import UnsupportedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_BY_LENGTH = ("dynamic", "longrope")


def check_supported(config: Any) -> None:
    """`config`: a transformers configuration. Raises UnsupportedModel with the reason."""
    reason = _mla(config) or _family(config) or _layer_types(config) or _rope(config)
    if reason:
        raise UnsupportedModel(f"model of type {config.model_type!r} cannot be served: {reason}")


def _mla(config: Any) -> str | None:
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention (MLA) is not supported, only pages of K and V heads are"
    return None


def _family(config: Any) -> str | None:
    if config.model_type not in FAMILIES:
        return f"its family is not one of {', '.join(FAMILIES)}"
    return None


def _layer_types(config: Any) -> str | None:
    types = getattr(config, "layer_types", None)
    if types is None and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return (
            f"its layers attend to a sliding window of {config.sliding_window} tokens, only full attention is supported"
        )
    other = sorted(set(types or ()) - {"full_attention"})
    if other:
        return f"it has layers of type {', '.join(other)}, only full attention is supported"
    return None


def _rope(config: Any) -> str | None:
    parameters = getattr(config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default")
    if kind in _ROPE_BY_LENGTH:
        return f"rotary scaling {kind!r} depends on the length of the batch, so KV in pages would not stay valid"
    return None
