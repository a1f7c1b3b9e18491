"""Paged attention by C kernels, on CPUs: decodes and chunks. Very long chunks are matrix products, which torch is best
at."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from engine.attention.base import AttentionScores
from engine.attention.torch_paged import TorchPagedAttention, TorchPlan
from engine.forward_batch import BatchRow, ForwardBatch
from engine.geometry import CacheGeometry
from engine.kv_cache import PagedKVCache
from engine.native import core

SHORT = 4096
"""Tokens of a row. Up to here the kernel is ahead of torch's gathering and multiplying in every shape measured (one
thread, AVX2: by 1.5 to 1.8 at 1024, 1.25 to 1.8 at 2048, 1.2 at 4096)."""


class PlacedRow(NamedTuple):
    """`token`: the first of its tokens among the packed ones."""

    row: BatchRow
    token: int


@dataclass(frozen=True)
class LongRun:
    """Rows for torch that lie side by side, and which of the packed tokens are theirs."""

    tokens: slice
    plan: TorchPlan


@dataclass(frozen=True)
class CPlan:
    """`short`: the kernel's rows, a kf_rows for each group of the geometry (None: there are none). `memory`: what they
    point into."""

    short: list[Any] | None
    memory: list[Any]
    long: list[LongRun]


class CPagedAttention:
    """Full and sliding groups, float32. `variant`: which compilation of the kernel runs; None: the best for this CPU.
    Rows of more than `short` tokens go through torch. Raises KernelsUnavailable."""

    def __init__(self, cache: PagedKVCache, variant: int | None = None, short: int = SHORT) -> None:
        self._ffi, self._lib = core()
        self._cache = cache
        self._short = short
        self._torch = TorchPagedAttention(cache, torch.float32)
        dim = cache.geometry.head_dim
        self._variant = self._lib.kf_best_variant(dim) if variant is None else variant
        self._layers = {layer: self._describe(layer) for layer in cache.layers}

    @property
    def variant(self) -> str:
        """The instruction set that runs."""
        return ("portable", "avx2", "avx512")[self._variant]

    @staticmethod
    def supports(geometry: CacheGeometry) -> bool:
        return geometry.dtype == "float32" and geometry.head_dim % 8 == 0

    def plan(self, batch: ForwardBatch) -> CPlan:
        short, runs, token = [], list[list[PlacedRow]](), 0
        for row in batch.rows:
            placed = PlacedRow(row, token)
            token += len(row.tokens)
            if len(row.tokens) <= self._short:
                short.append(placed)
            elif runs and _end(runs[-1][-1]) == placed.token:
                runs[-1].append(placed)
            else:
                runs.append([placed])
        memory: list[Any] = []
        kernel = [self._plan_group(group, short, memory) for group in range(len(self._cache.geometry.groups))]
        return CPlan(kernel if short else None, memory, [self._plan_long(run) for run in runs])

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: CPlan,
        scores: AttentionScores,
    ) -> torch.Tensor:
        heads, tokens, dim = query.shape
        output = query.new_empty(tokens, heads, dim)
        if plan.short:
            rows = plan.short[self._cache.layers[layer].group]
            self._run_kernel(self._layers[layer], rows, [query, keys, values], scores, output)
        for run in plan.long:
            part = query[:, run.tokens], keys[:, run.tokens], values[:, run.tokens]
            output[run.tokens] = self._torch.attend(layer, *part, run.plan, scores)
        return output

    def _run_kernel(
        self, layer: Any, rows: Any, tensors: Sequence[torch.Tensor], scores: AttentionScores, output: torch.Tensor
    ) -> None:
        """`layer`: a kf_layer, `rows`: a kf_rows, `tensors`: query, keys and values."""
        dense = [tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in tensors]
        packed = [(tensor.data_ptr(), *tensor.stride()[:2]) for tensor in dense]
        sinks = None if scores.sinks is None else scores.sinks.float().contiguous()
        how = (scores.scaling, scores.softcap or 0.0, 0 if sinks is None else sinks.data_ptr(), output.shape[1])
        threads = torch.get_num_threads()
        if self._lib.kf_attend(layer, rows, packed, [how], output.data_ptr(), threads, self._variant):
            raise MemoryError("no memory for the intermediate results of attention")

    def _describe(self, layer: int) -> Any:
        """A kf_layer."""
        geometry, keys = self._cache.geometry, self._cache.layers[layer].keys
        window = self._cache.group_of(layer).window or 0
        sizes = (geometry.page_size, geometry.kv_heads, geometry.head_dim, window)
        return self._ffi.new("kf_layer *", (keys.data_ptr(), keys.stride(0), *sizes))

    def _plan_group(self, group: int, placed: Sequence[PlacedRow], memory: list[Any]) -> Any:
        """A kf_rows."""
        layers = self._cache.geometry.groups[group]
        rows, tables = array("i"), array("i")
        for row, token in placed:
            rows.extend((row.start, len(row.tokens), token, len(tables), 0))
            tables.extend(row.tables[group][: layers.pages_for(row.end, self._cache.page_size)])
        buffers = self._ffi.from_buffer("kf_row[]", rows), self._ffi.from_buffer("int32_t[]", tables)
        memory += buffers
        return self._ffi.new("kf_rows *", (buffers[0], len(placed), buffers[1]))

    def _plan_long(self, run: Sequence[PlacedRow]) -> LongRun:
        plan = self._torch.plan(ForwardBatch([row for row, _ in run]))
        return LongRun(slice(run[0].token, _end(run[-1])), plan)


def _end(placed: PlacedRow) -> int:
    return placed.token + len(placed.row.tokens)
