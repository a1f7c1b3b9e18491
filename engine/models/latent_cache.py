"""Joins models with multi-head latent attention (MLA) to pages: their layers hand what is to be kept of each token to a
cache while it is still one latent vector."""

from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.base import LatentAttention


@dataclass(frozen=True)
class LatentCache:
    """Of one forward. Stands where such models take a transformers cache; its length is not asked for where positions
    are given."""

    backend: LatentAttention
    plan: Any

    def update(
        self, latents: torch.Tensor, rotary: torch.Tensor, layer: int, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[1, 1, T, ...]` of the packed tokens: what is normalised, and the keys' part that knows its position.
        Returns both `[1, 1, S, ...]` of the packed contexts."""
        parts = [latents.shape[-1], rotary.shape[-1]]
        contexts = self.backend.extend(layer, torch.cat([latents, rotary], dim=-1)[0, 0], self.plan)
        kept, rotated = torch.split(contexts[None, None], parts, dim=-1)
        return kept, rotated
