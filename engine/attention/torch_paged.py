"""Paged attention in plain torch: the truth on a CPU, and the speed there until a kernel replaces it.

Row by row: gather the row's KV, then scaled_dot_product_attention. Only valid tokens are ever read.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.base import AttentionScores
from engine.forward_batch import BatchRow, ForwardBatch
from engine.kv_cache import PagedKVCache


@dataclass(frozen=True)
class RowPlan:
    """One row: its slice of the packed tokens, its table cut to what is read, its length with this forward's tokens.
    `mask` `[queries, length]` is added to the scores. None: the row is fresh, or its one query sees every key."""

    tokens: slice
    table: torch.Tensor
    length: int
    fresh: bool
    mask: torch.Tensor | None


@dataclass(frozen=True)
class TorchPlan:
    """`blocks` and `slots` `[T]`: where each token's KV goes."""

    blocks: torch.Tensor
    slots: torch.Tensor
    rows: list[RowPlan]


class TorchPagedAttention:
    def __init__(self, cache: PagedKVCache, dtype: torch.dtype) -> None:
        self._cache = cache
        self._dtype = dtype

    def plan(self, batch: ForwardBatch) -> TorchPlan:
        size = self._cache.page_size
        blocks = [row.tables[0][p // size] for row in batch.rows for p in range(row.start, row.end)]
        slots = [p % size for row in batch.rows for p in range(row.start, row.end)]
        rows, begin = [], 0
        for row in batch.rows:
            rows.append(self._plan_row(row, begin))
            begin += len(row.tokens)
        return TorchPlan(torch.tensor(blocks), torch.tensor(slots), rows)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: TorchPlan,
        scores: AttentionScores,
    ) -> torch.Tensor:
        self._cache.write(layer, keys, values, plan.blocks, plan.slots)
        outputs = [self._attend_row(layer, query, keys, values, row, scores.scaling) for row in plan.rows]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).transpose(0, 1)

    def _plan_row(self, row: BatchRow, begin: int) -> RowPlan:
        count, length = len(row.tokens), row.end
        pages = -(-length // self._cache.page_size)
        mask = None
        if row.start and count > 1:
            future = torch.ones(count, length, dtype=torch.bool).triu(row.start + 1)
            mask = torch.zeros(count, length, dtype=self._dtype).masked_fill_(future, float("-inf"))
        table = torch.tensor(row.tables[0][:pages])
        return RowPlan(slice(begin, begin + count), table, length, row.start == 0, mask)

    def _attend_row(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        row: RowPlan,
        scaling: float,
    ) -> torch.Tensor:
        """Returns `[heads, queries, head_dim]`."""
        q = query[:, row.tokens]
        if row.fresh:
            k, v = keys[:, row.tokens], values[:, row.tokens]
            return _sdpa(q, k, v, scaling, causal=q.shape[1] > 1)
        k, v = self._cache.read(layer, row.table, row.length)
        if q.shape[1] == 1:
            return _decode(q, k, v, scaling)
        return _sdpa(q, k, v, scaling, mask=row.mask)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    return scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=q.shape[0] != k.shape[0]
    )[0]


def _decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """One query sees everything, so the query heads that share a KV head can pass as queries of it: no mask, and K and
    V are read once."""
    grouped = q.reshape(1, k.shape[0], q.shape[0] // k.shape[0], q.shape[2])
    return scaled_dot_product_attention(grouped, k[None], v[None], scale=scaling).reshape(q.shape)
