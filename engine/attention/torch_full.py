"""Full attention in plain torch: new KV is written first, then each row reads all of its pages."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention.base import AttentionScores
from engine.attention.contiguous import attend_contiguous
from engine.attention.masks import causal_mask
from engine.forward_batch import BatchRow
from engine.kv_cache import PagedKVCache


@dataclass(frozen=True)
class FullRow:
    """One row: its slice of the packed tokens, its table cut to what is read, its length with this forward's tokens.
    `fresh`: nothing is cached yet. `mask`: as `attend_contiguous` takes it."""

    tokens: slice
    table: torch.Tensor
    length: int
    fresh: bool
    mask: torch.Tensor | None


@dataclass(frozen=True)
class FullPlan:
    """`blocks` and `slots` `[T]`: where each token's KV goes."""

    blocks: torch.Tensor
    slots: torch.Tensor
    rows: list[FullRow]


class TorchFullAttention:
    """Of the cache's group number `group`."""

    def __init__(self, cache: PagedKVCache, group: int, dtype: torch.dtype) -> None:
        self._cache = cache
        self._group = group
        self._dtype = dtype
        self._device = cache.device

    def plan(self, rows: Sequence[BatchRow]) -> FullPlan:
        size = self._cache.page_size
        blocks = [row.tables[self._group][p // size] for row in rows for p in range(row.start, row.end)]
        slots = [p % size for row in rows for p in range(row.start, row.end)]
        plans, begin = [], 0
        for row in rows:
            plans.append(self._plan_row(row, begin))
            begin += len(row.tokens)
        return FullPlan(torch.tensor(blocks, device=self._device), torch.tensor(slots, device=self._device), plans)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: FullPlan,
        scores: AttentionScores,
    ) -> list[torch.Tensor]:
        """For each row `[heads, queries, head_dim]`."""
        self._cache.write(layer, keys, values, plan.blocks, plan.slots)
        outputs = []
        for row in plan.rows:
            if row.fresh:
                k, v = keys[:, row.tokens], values[:, row.tokens]
            else:
                k, v = self._cache.read(layer, row.table, row.length)
            outputs.append(attend_contiguous(query[:, row.tokens], k, v, scores, row.mask))
        return outputs

    def _plan_row(self, row: BatchRow, begin: int) -> FullRow:
        count, length = len(row.tokens), row.end
        pages = -(-length // self._cache.page_size)
        mask = None
        if row.start and count > 1:
            mask = causal_mask(range(row.start, length), range(length), self._dtype, device=self._device)
        table = torch.tensor(row.tables[self._group][:pages], device=self._device)
        return FullRow(slice(begin, begin + count), table, length, row.start == 0, mask)
