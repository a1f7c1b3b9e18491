"""Multi-head latent attention (MLA) in plain torch. Pages keep one latent vector of each token; K and V of all heads
are made from it by the model's own projection, anew for every forward.

    new latents --extend--> pages --> latents of all rows' contexts --the model's projection--> K and V --attend-->

Slow but clear: each step expands the whole context of every row. Folding the projection into queries and outputs
instead would read the latents as they are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from engine.attention.base import AttentionScores
from engine.attention.contiguous import attend_contiguous
from engine.attention.masks import causal_mask
from engine.forward_batch import BatchRow
from engine.kv_cache import PagedKVCache, Places


@dataclass(frozen=True)
class LatentRow:
    """One row: its slices of the packed tokens and of the packed contexts. `mask`: as `attend_contiguous` takes it."""

    tokens: slice
    context: slice
    mask: torch.Tensor | None


@dataclass(frozen=True)
class LatentPlan:
    """Where the packed tokens go, and where what each row sees lies, one context after the other."""

    written: Places
    read: Places
    rows: list[LatentRow]


class TorchLatentAttention:
    """Of the cache's group number `group`, whose pages have one part and one head."""

    def __init__(self, cache: PagedKVCache, group: int, dtype: torch.dtype) -> None:
        self._cache = cache
        self._group = group
        self._dtype = dtype

    def plan(self, rows: Sequence[BatchRow]) -> LatentPlan:
        plans, token, seen = list[LatentRow](), 0, 0
        for row in rows:
            tokens, context = slice(token, token + len(row.tokens)), slice(seen, seen + row.end)
            plans.append(LatentRow(tokens, context, self._mask(row)))
            token, seen = tokens.stop, context.stop
        return LatentPlan(
            self._places((row, row.start) for row in rows),
            self._places((row, 0) for row in rows),
            plans,
        )

    def extend(self, layer: int, latents: torch.Tensor, plan: LatentPlan) -> torch.Tensor:
        """Writes `latents` `[T, head_dim]` of the packed tokens into pages. Returns `[S, head_dim]`, a copy: those of
        each row's whole context, one row after the other."""
        pages = self._cache.layers[layer].keys[:, 0]
        pages[plan.written.blocks, plan.written.slots] = latents
        return pages[plan.read.blocks, plan.read.slots]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: LatentPlan,
        scores: AttentionScores,
    ) -> list[torch.Tensor]:
        """`keys` and `values` `[heads, S, ...]` are of the contexts that `extend` returned. For each row
        `[heads, queries, values' dim]`."""
        dim = values.shape[2]
        values = pad(values, (0, query.shape[2] - dim))  # torch's fused attention takes equal dimensions only
        return [
            attend_contiguous(query[:, row.tokens], keys[:, row.context], values[:, row.context], scores, row.mask)[
                ..., :dim
            ]
            for row in plan.rows
        ]

    def _mask(self, row: BatchRow) -> torch.Tensor | None:
        if not row.start or len(row.tokens) == 1:
            return None
        return causal_mask(range(row.start, row.end), range(row.end), self._dtype, device=self._cache.device)

    def _places(self, rows: Iterable[tuple[BatchRow, int]]) -> Places:
        """Of each row's tokens from that position on."""
        size, blocks, slots = self._cache.page_size, [], []
        for row, first in rows:
            positions = np.arange(first, row.end)
            blocks.append(np.asarray(row.tables[self._group], np.int64)[positions // size])
            slots.append(positions % size)
        device = self._cache.device
        return Places(*(torch.from_numpy(np.concatenate(each)).to(device) for each in (blocks, slots)))
