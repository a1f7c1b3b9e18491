"""Paged attention in plain torch: the truth on every machine, and what kernels are compared with.

Row by row, each layer as its group of the cache wants it. Only valid tokens are ever read.
"""

from typing import Any, TypeAlias

import torch

from engine.attention.base import AttentionScores
from engine.attention.torch_full import TorchFullAttention
from engine.attention.torch_latent import TorchLatentAttention
from engine.attention.torch_sliding import TorchSlidingAttention
from engine.forward_batch import ForwardBatch
from engine.kv_cache import PagedKVCache

TorchPlan: TypeAlias = tuple[Any, ...]
"""One plan for each group of the cache's geometry, in its order."""


class TorchPagedAttention:
    """`dtype`: of the model's queries, and so of the masks."""

    def __init__(self, cache: PagedKVCache, dtype: torch.dtype) -> None:
        self._cache = cache
        self._groups = [_of_group(cache, index, dtype) for index in range(len(cache.geometry.groups))]

    def plan(self, batch: ForwardBatch) -> TorchPlan:
        return tuple(group.plan(batch.rows) for group in self._groups)

    def extend(self, layer: int, latents: torch.Tensor, plan: TorchPlan) -> torch.Tensor:
        """See LatentAttention."""
        index = self._cache.layers[layer].group
        group = self._groups[index]
        assert isinstance(group, TorchLatentAttention), f"layer {layer} has pages of K and V"
        return group.extend(layer, latents, plan[index])

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: TorchPlan,
        scores: AttentionScores,
    ) -> torch.Tensor:
        group = self._cache.layers[layer].group
        outputs = self._groups[group].attend(layer, query, keys, values, plan[group], scores)
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).transpose(0, 1)


def _of_group(
    cache: PagedKVCache, index: int, dtype: torch.dtype
) -> TorchFullAttention | TorchSlidingAttention | TorchLatentAttention:
    window = cache.geometry.groups[index].window
    if cache.geometry.parts == 1:
        return TorchLatentAttention(cache, index, dtype)
    if window is None:
        return TorchFullAttention(cache, index, dtype)
    return TorchSlidingAttention(cache, index, window, dtype)
