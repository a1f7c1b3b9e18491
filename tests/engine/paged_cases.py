"""Batches over shuffled pages for one attention backend to be held against another, on any device."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.attention.base import AttentionBackend, AttentionScores
from engine.cache_pool import DTYPES, CachePool
from engine.forward_batch import BatchRow, ForwardBatch
from engine.geometry import AttentionType, CacheGeometry, LayerGroup
from engine.kv_cache import PagedKVCache
from protocol.layout import DType

FULL = (LayerGroup(AttentionType.FULL, (0, 1)),)
HYBRID = (LayerGroup(AttentionType.FULL, (2,)), LayerGroup(AttentionType.SLIDING, (0, 1), window=10))
LENGTHS = (37, 9, 1, 22)


def geometry(groups: tuple[LayerGroup, ...], dtype: DType, page_size: int = 8, kv_heads: int = 2) -> CacheGeometry:
    return CacheGeometry(page_size, kv_heads, head_dim=64, dtype=dtype, groups=groups)


@dataclass
class Cases:
    """Several sequences, run chunk by chunk: prompts in slices beside one another, then decodes."""

    geometry: CacheGeometry
    heads: int
    seed: int
    device: str = "cpu"
    cuts: list[list[tuple[int, int, int]]] = field(
        default_factory=lambda: [
            [(0, 0, 20), (1, 0, 5)],
            [(0, 20, 30), (2, 0, 1), (1, 5, 6)],
            [(0, 30, 37), (1, 6, 9), (3, 0, 13)],
            *[[(0, 37 + n, 38 + n), (1, 9 + n, 10 + n), (2, 1 + n, 2 + n), (3, 13 + n, 14 + n)] for n in range(15)],
        ]
    )
    """Of each forward: (sequence, start, end) of each row."""

    def __post_init__(self) -> None:
        generator = random.Random(self.seed)
        pages = 64 // self.geometry.page_size
        self.chunks = len(LENGTHS) * pages * len(self.geometry.groups)
        self._tables: list[list[list[int]]] = []
        free = list(range(2, 2 + self.chunks))
        generator.shuffle(free)
        for _ in LENGTHS:
            tables = [[free.pop() * per_chunk for _ in range(pages)] for per_chunk in self.geometry.blocks_per_chunk]
            self._tables.append(tables)

    def cache(self) -> PagedKVCache:
        """Of its own pool; pages are NaN until written."""
        return PagedKVCache(CachePool(self.geometry, self.chunks, debug_pages=True, device=self.device))

    def batches(self) -> list[ForwardBatch]:
        return [
            ForwardBatch([BatchRow(str(i), start, [0] * (end - start), self._tables[i]) for i, start, end in cut])
            for cut in self.cuts
        ]

    def inputs(self, batch: ForwardBatch, layer: int) -> tuple[torch.Tensor, ...]:
        """Query, keys and values of all rows, the same each time."""
        generator = torch.Generator().manual_seed(hash((self.seed, batch.rows[0].end, layer)) % (1 << 31))
        heads = (self.heads, self.geometry.kv_heads, self.geometry.kv_heads)
        drawn = [torch.randn(n, batch.num_tokens, 64, generator=generator) for n in heads]
        return tuple(part.to(self.device, DTYPES[self.geometry.dtype]) for part in drawn)

    def outputs(self, backend: AttentionBackend[Any], scores: AttentionScores) -> list[torch.Tensor]:
        """Of every layer of every forward."""
        results = []
        for batch in self.batches():
            plan = backend.plan(batch)
            for layer in range(self.geometry.layers):
                query, keys, values = self.inputs(batch, layer)
                results.append(backend.attend(layer, query, keys, values, plan, scores))
        return results


def assert_close(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """To the rounding of 16-bit floats."""
    for left, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(left.float(), right.float(), rtol=0.02, atol=0.02)
