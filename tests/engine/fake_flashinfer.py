"""FlashInfer's two batch wrappers on a CPU, by the formula. tests/gpu holds their signatures against the real ones.

As the real ones do, a wrapper for graphs keeps what it is planned with in buffers that it was given, has a fixed number
of rows, and runs by what the buffers hold then.
"""

from collections.abc import Sequence
from typing import Any

import torch

Pages = tuple[torch.Tensor, torch.Tensor]


class _Wrapper:
    def __init__(self, layout: str, use_cuda_graph: bool, rows: int, buffers: Sequence[torch.Tensor | None]) -> None:
        assert layout == "HND"
        self._fixed = rows if use_cuda_graph else None
        self._buffers = [part for part in buffers if part is not None]
        assert len(self._buffers) == (len(buffers) if use_cuda_graph else 0)
        self._tables: list[torch.Tensor] = []
        self.plans = 0

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8

    def _keep(self, tables: Sequence[torch.Tensor]) -> None:
        assert all(part.dtype == torch.int32 and part.device.type == "cpu" for part in tables)
        self.plans += 1
        if self._fixed is None:
            self._tables = [part.clone() for part in tables]
            return
        assert len(tables[-1]) == self._fixed, "the number of rows is fixed"
        for buffer, part in zip(self._buffers, tables, strict=True):
            buffer[: len(part)] = part
        self._tables = self._buffers

    def _attend(self, q: torch.Tensor, pages: Pages, starts: torch.Tensor) -> torch.Tensor:
        page_starts, indices, last = (part.tolist() for part in self._tables[-3:])
        output = torch.zeros_like(q)
        for row, tail in enumerate(last):
            begin, end = int(starts[row]), int(starts[row + 1])
            ids = indices[page_starts[row] : page_starts[row + 1]]
            keys, values = (_tokens(part, ids, tail) for part in pages)
            output[begin:end] = self._rows(q[begin:end], keys, values)
        return output

    def _rows(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`q` `[queries, heads, head_dim]`, the last queries of `keys` and `values` `[kv_heads, keys, head_dim]`."""
        repeats = q.shape[1] // keys.shape[0]
        k, v = (part.float().repeat_interleave(repeats, 0) for part in (keys, values))
        scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * self._how["sm_scale"]
        cap = self._how["logits_soft_cap"]
        scores = cap * torch.tanh(scores / cap) if cap else scores
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - scores.shape[1] + 1)
        weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
        return (weights @ v).transpose(0, 1).to(q.dtype)

    _how: dict[str, Any]


def _tokens(pages: torch.Tensor, ids: Sequence[int], tail: int) -> torch.Tensor:
    """`[kv_heads, tokens, head_dim]`; the last page holds `tail` of them."""
    held = pages[list(ids)].transpose(0, 1).flatten(1, 2)
    return held[:, : (len(ids) - 1) * pages.shape[2] + tail]


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        rows = 0 if paged_kv_last_page_len_buffer is None else len(paged_kv_last_page_len_buffer)
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        super().__init__(kv_layout, use_cuda_graph, rows, buffers)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        self._how = {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap}
        self._keep((indptr, indices, last_page_len))

    def run(self, q: torch.Tensor, paged_kv_cache: Pages) -> torch.Tensor:
        return self._attend(q, paged_kv_cache, torch.arange(len(q) + 1))


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        backend: str = "auto",
        max_total_num_rows: int | None = None,
    ) -> None:
        rows = 0 if paged_kv_last_page_len_buf is None else len(paged_kv_last_page_len_buf)
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        super().__init__(kv_layout, use_cuda_graph, rows, buffers)
        self._max_rows = max_total_num_rows

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        assert self._max_rows is None or int(qo_indptr[-1]) <= self._max_rows
        self._how = {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap}
        self._keep((qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len))

    def run(self, q: torch.Tensor, paged_kv_cache: Pages) -> torch.Tensor:
        return self._attend(q, paged_kv_cache, self._tables[0])
