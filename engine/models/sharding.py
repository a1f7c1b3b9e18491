"""Cuts a loaded transformers model down to one rank's shard, by the plan that its configuration carries
(`base_model_tp_plan`), and names the modules whose outputs are then only parts of a sum.

colwise    rows of the weight: outputs are divided (heads, MLP features)
rowwise    columns of the weight: inputs are divided, and the ranks' outputs add up to the whole
"""

import re
from collections.abc import Callable
from typing import Any, cast

import torch

from engine.errors import UnsupportedModel
from engine.models.families import LATENT
from engine.tensor_parallel import Shard

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_KV = ("self_attn.k_proj", "self_attn.v_proj")
_REPLICATED = ("replicated_with_grad_allreduce", "mla_kv_a_proj")
_LATENT_ATTENTION = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_b_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
"""Every rank makes the latent vectors, and of them its own heads. transformers' plan for DeepSeek-V3 leaves attention
whole; its plan for V2 says this."""


def check_plan(config: Any) -> None:
    """Raises UnsupportedModel where the family cannot be divided."""
    plan = _plan(config)
    missing = [name for name in ATTENTION if config.model_type not in LATENT and f"layers.*.{name}" not in plan]
    if missing:
        raise UnsupportedModel(
            f"models of type {config.model_type!r} cannot be divided among devices: transformers' plan does not say how"
            f" to divide {', '.join(missing)}: choose --tp 1"
        )
    unknown = sorted({style for style in plan.values() if style not in (*_CUTS, *_SUMMED, *_REPLICATED)})
    if unknown:
        raise UnsupportedModel(
            f"models of type {config.model_type!r} cannot be divided among devices: their plan asks for"
            f" {', '.join(unknown)}: choose --tp 1"
        )


def cut(model: torch.nn.Module, shard: Shard) -> None:
    """In place; what belongs to other ranks is freed. The model is one that `check_plan` lets pass."""
    base = cast(Any, model).base_model
    for name, module in base.named_modules():
        for parameter in [key for key, _ in module.named_parameters(recurse=False)]:
            style = _style(base.config, name, parameter)
            if style in _CUTS:
                kept = _CUTS[style](module, parameter, _KeptHeads(base.config, name, shard))
                setattr(module, parameter, None if kept is None else _parameter(kept))


def partial_sums(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules of which each rank's output is a part of the sum: the output projections of attention, and what ends an
    MLP."""
    base = cast(Any, model).base_model
    return [module for name, module in base.named_modules() if _plan(base.config).get(_pattern(name)) in _SUMMED]


class _KeptHeads:
    """Which of a module's outputs or inputs a rank keeps."""

    def __init__(self, config: Any, module: str, shard: Shard) -> None:
        self.shard = shard
        self._kv_heads = config.num_key_value_heads if module.endswith(_KV) else None

    def of(self, count: int) -> slice:
        """Of `count` features."""
        if self._kv_heads is None:
            return self.shard.part(count)
        heads, dim = self.shard.kv_heads(self._kv_heads), count // self._kv_heads
        return slice(heads.start * dim, heads.stop * dim)


def _colwise(module: Any, parameter: str, kept: _KeptHeads) -> torch.Tensor:
    """Of a weight or a bias."""
    whole = getattr(module, parameter)
    rows = whole[kept.of(len(whole))]
    module.out_features = len(rows)
    return cast(torch.Tensor, rows)


def _rowwise(module: Any, parameter: str, kept: _KeptHeads) -> torch.Tensor | None:
    """A bias is added once, by the main rank."""
    whole = getattr(module, parameter)
    if whole.dim() == 1:
        return cast(torch.Tensor, whole) if kept.shard.is_main else None
    columns = whole[..., kept.of(whole.shape[-1])]
    if whole.dim() == 2:
        module.in_features = columns.shape[-1]
    return cast(torch.Tensor, columns)


def _packed_colwise(module: Any, parameter: str, kept: _KeptHeads) -> torch.Tensor:
    """Gates above ups, `[experts, 2 * features, hidden]`: a part of each."""
    return torch.cat([half[:, kept.of(half.shape[1])] for half in getattr(module, parameter).chunk(2, dim=1)], dim=1)


_CUTS: dict[str, Callable[[Any, str, _KeptHeads], torch.Tensor | None]] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "packed_colwise": _packed_colwise,
}
_SUMMED = ("rowwise", "moe_tp_experts")


def _parameter(kept: torch.Tensor) -> torch.nn.Parameter:
    """Memory of its own: a view would keep the whole alive."""
    return torch.nn.Parameter(kept.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)


def _plan(config: Any) -> dict[str, str]:
    latent = _LATENT_ATTENTION if config.model_type in LATENT else {}
    return {**(config.base_model_tp_plan or {}), **latent}


def _style(config: Any, module: str, parameter: str) -> str:
    """The plan names a linear module, or a parameter itself (of experts)."""
    plan, path = _plan(config), _pattern(module)
    return plan.get(f"{path}.{parameter}") or plan.get(path) or ""


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+", ".*", name)
