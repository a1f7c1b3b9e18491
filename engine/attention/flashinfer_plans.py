"""Plans for FlashInfer's wrappers: once per forward and group, for all of its layers.

Captured forwards read what they work on from buffers that never move. A wrapper belongs to one shape then; wrappers of
one planner and group share the buffers, for only the one planned last is run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.page_tables import page_tables, places
from engine.attention.torch_sliding import TorchSlidingAttention
from engine.device_batch import Staged
from engine.forward_batch import BatchRow, ForwardBatch
from engine.geometry import CacheGeometry
from engine.kv_cache import PagedKVCache
from engine.padding import GraphKey, is_decode

FLOAT_WORKSPACE_BYTES = 384 << 20
"""For partial results of long rows that several blocks of threads share; what the large engines reserve."""
INT_WORKSPACE_BYTES = 8 << 20
LAYOUT = "HND"
BACKEND = "fa2"
"""Reads strided pages on every device of the last years, and its captured schedules are refreshed by planning anew."""


@dataclass(frozen=True)
class KernelShape:
    """What is the same in every layer. `dtype`: of queries and of KV."""

    heads: int
    dtype: torch.dtype
    scaling: float
    softcap: float | None

    def arguments(self) -> dict[str, Any]:
        """As both wrappers' `plan` takes them."""
        return {
            "sm_scale": self.scaling,
            "logits_soft_cap": self.softcap,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }


@dataclass(frozen=True)
class PagedPlan:
    """`kernel`: a planned wrapper. `blocks` and `slots` `[T]`: where each new token's KV goes."""

    kernel: Any
    blocks: torch.Tensor
    slots: torch.Tensor


class FlashInferPlanner:
    """Plans over one set of buffers: a plan is valid until the next one is asked for. `sliding`: who plans the longer
    rows of groups with a window, by group. `static`: what is to be captured; None: nothing."""

    def __init__(
        self,
        cache: PagedKVCache,
        wrappers: "Wrappers",
        sliding: Mapping[int, TorchSlidingAttention],
        static: "StaticSizes | None",
    ) -> None:
        self._sliding = sliding
        self._groups = [_GroupPlanner(cache, group, wrappers, static) for group in range(len(cache.geometry.groups))]

    def plan(self, batch: ForwardBatch, key: GraphKey | None) -> tuple[Any, ...]:
        decode = is_decode(batch)
        plans: list[Any] = []
        for index, group in enumerate(self._groups):
            if index in self._sliding and not decode:
                assert key is None, "rows of several queries over a ring cannot be captured"
                plans.append(self._sliding[index].plan(batch.rows))
            else:
                plans.append(group.plan(batch.rows, decode, key))
        return tuple(plans)


@dataclass(frozen=True)
class StaticSizes:
    """Of the buffers. `max_length`: tokens of the longest row."""

    max_tokens: int
    max_rows: int
    max_length: int


class Wrappers:
    """Makes FlashInfer's wrappers. `kernels`: the flashinfer module. All wrappers share the workspace for results that
    are still to be merged: forwards run one after the other."""

    def __init__(self, kernels: Any, shape: KernelShape, device: torch.device) -> None:
        self.shape = shape
        self._kernels = kernels
        self._workspace = torch.zeros(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def decode(self, schedule: torch.Tensor, pages: torch.Tensor | None, key: GraphKey | None) -> Any:
        """`schedule`: INT_WORKSPACE_BYTES that the next planned wrapper may overwrite. `pages`: where a captured one
        reads page ids; with it comes its `key`. Tensor cores serve every number of heads per KV head."""
        buffers = {}
        if pages is not None and key:
            buffers = {f"paged_kv_{name}_buffer": part for name, part in self._tables(pages, key).items()}
        wrapper = self._kernels.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, LAYOUT, use_cuda_graph=key is not None, use_tensor_cores=True, backend=BACKEND, **buffers
        )
        wrapper.reset_workspace_buffer(self._workspace, schedule)
        return wrapper

    def prefill(self, schedule: torch.Tensor, pages: torch.Tensor | None, key: GraphKey | None) -> Any:
        """Likewise."""
        captured: dict[str, Any] = {}
        if pages is not None and key:
            captured = {f"paged_kv_{name}_buf": part for name, part in self._tables(pages, key).items()}
            captured["qo_indptr_buf"] = _counts(key.rows + 1, pages.device)
            captured["max_total_num_rows"] = key.query_tokens
        wrapper = self._kernels.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, LAYOUT, use_cuda_graph=key is not None, backend=BACKEND, **captured
        )
        wrapper.reset_workspace_buffer(self._workspace, schedule)
        return wrapper

    def _tables(self, pages: torch.Tensor, key: GraphKey) -> dict[str, torch.Tensor]:
        starts, last = _counts(key.rows + 1, pages.device), _counts(key.rows, pages.device)
        return {"indptr": starts, "indices": pages, "last_page_len": last}


class _GroupPlanner:
    """Of one group of layers."""

    def __init__(self, cache: PagedKVCache, group: int, wrappers: Wrappers, static: StaticSizes | None) -> None:
        self._geometry = cache.geometry
        self._device = cache.device
        self._group = group
        self._wrappers = wrappers
        self._schedule = torch.zeros(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self._static = _StaticTables(static, group, self._geometry, self._device) if static else None
        self._kernels: dict[GraphKey | bool, Any] = {}

    def plan(self, rows: Sequence[BatchRow], decode: bool, key: GraphKey | None) -> PagedPlan:
        kernel = self._kernel(decode, key)
        tables = page_tables(rows, self._group, self._geometry, key.rows if key else None)
        starts = [] if decode else [torch.from_numpy(tables.query_starts)]
        pages = [torch.from_numpy(part) for part in tables[1:]]
        how = {} if decode else {"causal": True}
        kernel.plan(*starts, *pages, *self._sizes(), **how, **self._wrappers.shape.arguments())
        return PagedPlan(kernel, *self._places(rows, key))

    def _sizes(self) -> tuple[int, int, int, int]:
        geometry = self._geometry
        return self._wrappers.shape.heads, geometry.kv_heads, geometry.head_dim, geometry.page_size

    def _places(self, rows: Sequence[BatchRow], key: GraphKey | None) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, slots = (torch.from_numpy(part) for part in places(rows, self._group, self._geometry))
        if key and self._static:
            return self._static.write(blocks, slots)
        return blocks.to(self._device), slots.to(self._device)

    def _kernel(self, decode: bool, key: GraphKey | None) -> Any:
        """Of the key's shape, or the one for whatever is not captured."""
        name = decode if key is None else key
        if name not in self._kernels:
            make = self._wrappers.decode if decode else self._wrappers.prefill
            self._kernels[name] = make(self._schedule, self._static.pages if key and self._static else None, key)
        return self._kernels[name]


class _StaticTables:
    """Buffers that captured forwards read. `pages`: page ids of all rows; a wrapper writes to it when it is planned."""

    def __init__(self, sizes: StaticSizes, group: int, geometry: CacheGeometry, device: torch.device) -> None:
        self.pages = _counts(
            sizes.max_rows * geometry.groups[group].pages_for(sizes.max_length, geometry.page_size), device
        )
        self._blocks, self._slots = (Staged(sizes.max_tokens, device) for _ in range(2))

    def write(self, blocks: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(blocks)
        self._blocks.upload(blocks, 0, count)
        self._slots.upload(slots, 0, count)
        return self._blocks.device[:count], self._slots.device[:count]


def _counts(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)
