"""Attention on CUDA by FlashInfer's kernels, over the pool's pages as they are: heads before tokens, K and V as strided
views of one tensor.

A decode batch (one query a row) reads pages in both kinds of group. A sliding group is a ring there: written first, it
holds just the keys that the query sees, in whatever order, which softmax does not ask for (positions are in the keys
already). Longer rows of a sliding group must read the ring before they write to it, which no kernel here does: plain
torch gathers them.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch

from engine.attention.base import AttentionScores
from engine.attention.flashinfer_plans import FlashInferPlanner, KernelShape, PagedPlan, StaticSizes, Wrappers
from engine.attention.torch_sliding import TorchSlidingAttention
from engine.errors import UnsupportedModel
from engine.forward_batch import ForwardBatch
from engine.geometry import CacheGeometry
from engine.kv_cache import PagedKVCache

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
HEAD_DIMS = (64, 128, 256)

FlashInferPlan: TypeAlias = tuple[Any, ...]
"""One plan for each group of the cache's geometry, in its order: a PagedPlan, or TorchSlidingAttention's."""


class FlashInferAttention:
    """`heads`: of queries. `scores`: of every layer. `kernels`: the flashinfer module, or what offers its two batch
    wrappers. Raises UnsupportedModel where they cannot serve the model."""

    def __init__(self, cache: PagedKVCache, heads: int, scores: AttentionScores, kernels: Any) -> None:
        reason = unsupported(cache.geometry, scores)
        if reason:
            raise UnsupportedModel(reason)
        geometry = cache.geometry
        dtype = DTYPES[geometry.dtype]
        self._cache = cache
        self._scores = scores
        self._wrappers = Wrappers(kernels, KernelShape(heads, dtype, scores.scaling, scores.softcap), cache.device)
        self._sliding = {
            index: TorchSlidingAttention(cache, index, group.window, dtype)
            for index, group in enumerate(geometry.groups)
            if group.window is not None
        }
        self._planner = self.planner(None)

    def planner(self, static: StaticSizes | None) -> FlashInferPlanner:
        """With buffers of its own, so that its plans and those of others may be alive at once. `static`: for forwards
        of which some are captured."""
        return FlashInferPlanner(self._cache, self._wrappers, self._sliding, static)

    def plan(self, batch: ForwardBatch) -> FlashInferPlan:
        return self._planner.plan(batch, None)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: FlashInferPlan,
        scores: AttentionScores,
    ) -> torch.Tensor:
        assert scores == self._scores, f"layer {layer} wants {scores}, the kernels are planned for {self._scores}"
        pages = self._cache.layers[layer]
        part = plan[pages.group]
        if not isinstance(part, PagedPlan):
            rows = self._sliding[pages.group].attend(layer, query, keys, values, part, scores)
            return torch.cat(rows, dim=1).transpose(0, 1)
        self._cache.write(layer, keys, values, part.blocks, part.slots)
        output = part.kernel.run(query.transpose(0, 1).contiguous(), (pages.keys, pages.values))
        return cast(torch.Tensor, output)


@dataclass(frozen=True)
class _Seen:
    """What one layer's attention module says of its scores."""

    scaling: float
    softcap: float | None
    has_sinks: bool


def scores_of(model: torch.nn.Module) -> AttentionScores:
    """How a transformers model wants its scores, before it has run. Raises UnsupportedModel if its layers differ."""
    base = cast(Any, model).base_model
    seen = {
        _Seen(attention.scaling, getattr(attention, "attn_logit_softcapping", None), hasattr(attention, "sinks"))
        for attention in (layer.self_attn for layer in base.layers)
    }
    if len(seen) > 1:
        raise UnsupportedModel("its layers compute attention scores in different ways")
    [only] = seen
    return AttentionScores(only.scaling, only.softcap, base.layers[0].self_attn.sinks if only.has_sinks else None)


def unsupported(geometry: CacheGeometry, scores: AttentionScores) -> str | None:
    """Why FlashInfer's kernels cannot serve a model, if they cannot."""
    if scores.sinks is not None:
        return "attention sinks are not supported on FlashInfer"
    if geometry.parts == 1:
        return "latent vectors (MLA) are not supported on FlashInfer here"
    if geometry.dtype not in DTYPES:
        return f"FlashInfer computes in {' or '.join(DTYPES)}, not in {geometry.dtype}"
    if geometry.head_dim not in HEAD_DIMS:
        return f"FlashInfer has kernels for heads of {HEAD_DIMS} dimensions, not of {geometry.head_dim}"
    return None
