"""Sliding-window attention in plain torch: what a row still sees is read from its ring, before the new KV takes its
place there."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engine.attention import ring
from engine.attention.base import AttentionScores
from engine.attention.contiguous import attend_contiguous
from engine.attention.masks import causal_mask
from engine.forward_batch import BatchRow
from engine.kv_cache import PagedKVCache, Places


@dataclass(frozen=True)
class SlidingRow:
    """One row: its slice of the packed tokens, where its cached tokens lie (None: it is fresh), and `mask` as
    `attend_contiguous` takes it."""

    tokens: slice
    cached: Places | None
    mask: torch.Tensor | None


@dataclass(frozen=True)
class SlidingPlan:
    """`stored`: which of the packed tokens are written, and `places` where."""

    stored: torch.Tensor
    places: Places
    rows: list[SlidingRow]


class TorchSlidingAttention:
    """Of the cache's group number `group`."""

    def __init__(self, cache: PagedKVCache, group: int, window: int, dtype: torch.dtype) -> None:
        self._cache = cache
        self._group = group
        self._window = window
        self._dtype = dtype
        self._device = cache.device

    def plan(self, rows: Sequence[BatchRow]) -> SlidingPlan:
        plans: list[SlidingRow] = []
        stored: list[int] = []
        places: list[tuple[int, int]] = []
        begin = 0
        for row in rows:
            kept = ring.stored_positions(row.start, row.end, self._window)
            stored += [begin + position - row.start for position in kept]
            places += self._places(row, kept)
            plans.append(self._plan_row(row, begin))
            begin += len(row.tokens)
        return SlidingPlan(torch.tensor(stored, device=self._device), self._as_tensors(places), plans)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: SlidingPlan,
        scores: AttentionScores,
    ) -> list[torch.Tensor]:
        """For each row `[heads, queries, head_dim]`."""
        seen = [self._seen(layer, keys, values, row) for row in plan.rows]
        new = keys[:, plan.stored], values[:, plan.stored]
        self._cache.write(layer, *new, plan.places.blocks, plan.places.slots)
        return [
            attend_contiguous(query[:, row.tokens], k, v, scores, row.mask)
            for row, (k, v) in zip(plan.rows, seen, strict=True)
        ]

    def _plan_row(self, row: BatchRow, begin: int) -> SlidingRow:
        count = len(row.tokens)
        cached = ring.cached_positions(row.start, self._window)
        mask = None
        if count > 1 and (cached or count > self._window):
            queries = range(row.start, row.end)
            keys = range(row.start - len(cached), row.end)
            mask = causal_mask(queries, keys, self._dtype, self._window, self._device)
        places = self._as_tensors(self._places(row, cached)) if cached else None
        return SlidingRow(slice(begin, begin + count), places, mask)

    def _places(self, row: BatchRow, positions: Iterable[int]) -> list[tuple[int, int]]:
        """Block and slot of each."""
        table, size = row.tables[self._group], self._cache.page_size
        return [(table[slot // size], slot % size) for slot in ring.slots(positions, self._window)]

    def _seen(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, row: SlidingRow
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of what is cached and what is new, in order of position."""
        k, v = keys[:, row.tokens], values[:, row.tokens]
        if row.cached is None:
            return k, v
        old_k, old_v = self._cache.gather(layer, row.cached.blocks, row.cached.slots)
        return torch.cat([old_k, k], dim=1), torch.cat([old_v, v], dim=1)

    def _as_tensors(self, places: Sequence[tuple[int, int]]) -> Places:
        blocks, slots = torch.tensor(places, device=self._device).T
        return Places(blocks, slots)
