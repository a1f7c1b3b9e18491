"""What every attention backend offers."""

from typing import Protocol, TypeVar

import torch

from engine.forward_batch import ForwardBatch

Plan = TypeVar("Plan")


class AttentionBackend(Protocol[Plan]):
    """Writes a forward's new KV into pages and attends over all KV of each row, causally."""

    def plan(self, batch: ForwardBatch) -> Plan:
        """Everything about the batch that all layers share. Valid for one forward."""

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: Plan, scaling: float
    ) -> torch.Tensor:
        """`query` `[heads, T, head_dim]`, `keys` and `values` `[kv_heads, T, head_dim]` of the batch's T packed
        tokens. Returns `[T, heads, head_dim]`. When it returns, the new KV is in the pages."""
