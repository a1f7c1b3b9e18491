"""One forward's attention over a cache in every detail, in numpy and float64: what it reads, returns and writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.base import AttentionBackend, AttentionScores
from engine.cache_pool import CachePool
from engine.forward_batch import BatchRow, ForwardBatch
from engine.geometry import CacheGeometry, LayerGroup, group_layers
from engine.kv_cache import PagedKVCache

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Scene:
    """`windows`: of each layer, None for full attention. `rows`: start and count."""

    page_size: int
    kv_heads: int
    share: int
    head_dim: int
    windows: tuple[int | None, ...]
    rows: tuple[tuple[int, int], ...]
    softcap: float | None = None
    sinks: bool = False
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.share

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.rows)

    def geometry(self) -> CacheGeometry:
        sliding = [window for window in self.windows if window is not None]
        types = ["full_attention" if window is None else "sliding_attention" for window in self.windows]
        groups = group_layers(len(types), types, sliding[0] if sliding else None)
        return CacheGeometry(self.page_size, self.kv_heads, self.head_dim, "float32", groups)


class Stage:
    """A pool in which the rows' past is cached in shuffled blocks, every other slot NaN, and a forward's tensors."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self._numbers = np.random.default_rng(scene.seed)
        geometry = scene.geometry()
        held = [[_pages(group, start + count, scene) for start, count in scene.rows] for group in geometry.groups]
        chunks = sum(-(-sum(pages) // per) for pages, per in zip(held, geometry.blocks_per_chunk, strict=True))
        self.pool = CachePool(geometry, chunks + 1, debug_pages=True)
        self.cache = PagedKVCache(self.pool)
        self.tables = self._hand_out(held)
        self.sequences = {
            layer: [self._draw(2, scene.kv_heads, start + count, scene.head_dim) for start, count in scene.rows]
            for layer in self.cache.layers
        }
        self.query = self._draw(scene.heads, scene.tokens, scene.head_dim)
        self.scores = AttentionScores(
            float(self._numbers.uniform(0.1, 1.0)),
            scene.softcap,
            torch.from_numpy(self._draw(scene.heads)).float() if scene.sinks else None,
        )
        for layer in self.cache.layers:
            for row, (start, _) in enumerate(scene.rows):
                self._store(layer, row, range(start))

    def batch(self) -> ForwardBatch:
        tables = list(zip(*self.tables, strict=True))
        return ForwardBatch(
            [
                BatchRow(str(i), start, range(start, start + count), list(table))
                for i, ((start, count), table) in enumerate(zip(self.scene.rows, tables, strict=True))
            ]
        )

    def run(self, backend: AttentionBackend[Any], layer: int) -> torch.Tensor:
        """`[tokens, heads, head_dim]`. The tensors are strided as a model's are."""
        new = np.concatenate([both[:, :, start:] for both, (start, _) in self._with_rows(layer)], axis=2)
        query, keys, values = (_as_in_a_model(array) for array in (self.query, *new))
        return backend.attend(layer, query, keys, values, backend.plan(self.batch()), self.scores)

    def expected(self, layer: int) -> Array:
        """`[tokens, heads, head_dim]`."""
        outputs, begin = [], 0
        for (keys, values), (start, count) in self._with_rows(layer):
            query = self.query[:, begin : begin + count].reshape(self.scene.kv_heads, self.scene.share, count, -1)
            weights = self._weights(np.einsum("hgqd,hkd->hgqk", query, keys), start, self.window(layer))
            output = np.einsum("hgqk,hkd->qhgd", weights, values)
            outputs.append(output.reshape(count, self.scene.heads, -1))
            begin += count
        return np.concatenate(outputs)

    def expect_written(self, layer: int) -> None:
        """Puts into the pool what a forward of this layer should write."""
        for row, (start, count) in enumerate(self.scene.rows):
            self._store(layer, row, range(start, start + count))

    def window(self, layer: int) -> int | None:
        return self.cache.group_of(layer).window

    def _weights(self, products: Array, start: int, window: int | None) -> Array:
        """`products` `[kv_heads, share, queries, keys]`."""
        scores = products * self.scores.scaling
        if self.scores.softcap:
            scores = np.tanh(scores / self.scores.softcap) * self.scores.softcap
        distance = np.arange(start, start + scores.shape[2])[:, None] - np.arange(scores.shape[3])
        scores[..., (distance < 0) | (distance >= (window or np.inf))] = -np.inf
        largest, sinks = scores.max(-1, keepdims=True), 0.0
        if self.scores.sinks is not None:
            column = self.scores.sinks.double().numpy().reshape(*scores.shape[:2], 1, 1)
            largest = np.maximum(largest, column)
            sinks = np.exp(column - largest)
        exponentials = np.exp(scores - largest)
        weights: Array = exponentials / (exponentials.sum(-1, keepdims=True) + sinks)
        return weights

    def _with_rows(self, layer: int) -> list[tuple[Array, tuple[int, int]]]:
        return list(zip(self.sequences[layer], self.scene.rows, strict=True))

    def _store(self, layer: int, row: int, positions: range) -> None:
        """Of positions that share a slot, the last stays."""
        place, ring = self.cache.layers[layer], self.window(layer) or positions.stop
        stored = np.arange(max(positions.start, positions.stop - ring), positions.stop)
        pages, offsets = np.divmod(stored % ring, self.scene.page_size) if len(stored) else (stored, stored)
        blocks = np.array(self.tables[place.group][row])[pages]
        keys, values = torch.from_numpy(self.sequences[layer][row][:, :, stored]).float()
        place.keys[blocks, :, offsets] = keys.transpose(0, 1)
        place.values[blocks, :, offsets] = values.transpose(0, 1)

    def _hand_out(self, held: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """By group and row: blocks in no order, of chunks that no other group has."""
        tables, chunk = [], self.pool.reserved
        for pages, per_chunk in zip(held, self.pool.geometry.blocks_per_chunk, strict=True):
            chunks = -(-sum(pages) // per_chunk)
            blocks = self._numbers.permutation(chunks * per_chunk) + chunk * per_chunk
            tables.append([part.tolist() for part in np.split(blocks, np.cumsum(pages))[:-1]])
            chunk += chunks
        return tables

    def _draw(self, *shape: int) -> Array:
        """Numbers that float32 has."""
        return self._numbers.standard_normal(shape).astype(np.float32).astype(np.float64)


def _pages(group: LayerGroup, length: int, scene: Scene) -> int:
    return -(-min(length, group.window or length) // scene.page_size)


def _as_in_a_model(array: Array) -> torch.Tensor:
    """Heads first in shape, tokens first in memory."""
    return torch.from_numpy(array).float().transpose(0, 1).contiguous().transpose(0, 1)
