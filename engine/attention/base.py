"""What every attention backend offers."""

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from engine.forward_batch import ForwardBatch

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class AttentionScores:
    """How scores are computed, as the layer's model wants it. `softcap`: scores s become softcap * tanh(s / softcap)
    before they are masked (Gemma 2). `sinks` `[heads]`: one more score per head that takes weight but has no value
    (gpt-oss)."""

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionBackend(Protocol[Plan]):
    """Writes a forward's new KV into pages and attends over the KV of each row, causally.

    It knows the cache geometry: which group a layer is in, and that group's window. Full group: new KV is written at
    positions start..end, then everything up to each query is seen. Sliding group: the last min(start, window - 1)
    cached positions are read before the last min(count, window) new tokens are written into the ring.
    """

    def plan(self, batch: ForwardBatch) -> Plan:
        """Everything about the batch that all layers share. Valid for one forward; keeps nothing of the batch's lists,
        which change once this returns."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: Plan,
        scores: AttentionScores,
    ) -> torch.Tensor:
        """`query` `[heads, T, head_dim]`, `keys` and `values` `[kv_heads, T, head_dim]` of the batch's T packed
        tokens. Returns `[T, heads, head_dim]`. When it returns, the new KV is in the pages."""


class LatentAttention(Protocol):
    """Of a backend whose pages keep a latent vector of each token, from which the model makes K and V of all heads. Its
    `attend` then takes keys and values of what `extend` returned, and writes nothing."""

    def extend(self, layer: int, latents: torch.Tensor, plan: Any) -> torch.Tensor:
        """Writes `latents` `[T, head_dim]` of the packed tokens into pages. Returns those of each row's whole context,
        one row after the other, `[S, head_dim]`."""
