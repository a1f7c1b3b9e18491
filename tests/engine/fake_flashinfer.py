"""FlashInfer's two batch wrappers in plain torch, by the formula, on any device. tests/gpu holds them against the real.

As the real ones do, a wrapper for graphs keeps what it is planned with in buffers that it was given, has a fixed number
of rows, and runs by what the buffers hold then: nothing in `run` asks the host, so that it can be captured.
"""

from typing import NamedTuple

import torch

Pages = tuple[torch.Tensor, torch.Tensor]


class Tables(NamedTuple):
    """As both wrappers take them; a decode has a query a row."""

    query_starts: torch.Tensor
    page_starts: torch.Tensor
    pages: torch.Tensor
    last_page_tokens: torch.Tensor


class Scores(NamedTuple):
    scaling: float
    softcap: float | None


class _Wrapper:
    def __init__(self, layout: str, workspace: torch.Tensor, buffers: Tables | None) -> None:
        assert layout == "HND"
        self._device = workspace.device
        self._buffers = buffers
        self._tables = buffers
        self._most_pages = len(buffers.pages) // len(buffers.last_page_tokens) if buffers else 0
        self._scores = Scores(1.0, None)
        self.plans = 0

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8

    def _keep(self, tables: Tables, scores: Scores) -> None:
        assert all(part.dtype == torch.int32 and part.device.type == "cpu" for part in tables)
        self.plans += 1
        self._scores = scores
        if self._buffers is None:
            self._tables = Tables(*(part.to(self._device) for part in tables))
            self._most_pages = int(tables.page_starts.diff().max())
            return
        assert len(tables.last_page_tokens) == len(self._buffers.last_page_tokens), "the number of rows is fixed"
        for buffer, part in zip(self._buffers, tables, strict=True):
            buffer[: len(part)] = part.to(self._device)

    def run(self, q: torch.Tensor, paged_kv_cache: Pages) -> torch.Tensor:
        """`q` and the result `[queries, heads, head_dim]`. Every query has its row's pages gathered for it."""
        assert self._tables, "planned first"
        tables, size = self._tables, paged_kv_cache[0].shape[2]
        queries = torch.arange(len(q), device=q.device)
        row = torch.searchsorted(tables.query_starts[1:].contiguous(), queries, right=True)
        row = row.clamp(max=len(tables.last_page_tokens) - 1)
        first, behind = tables.page_starts[row], tables.page_starts[row + 1]
        length = (behind - first - 1) * size + tables.last_page_tokens[row]
        position = length - (tables.query_starts[row + 1] - queries)
        place = first[:, None] + torch.arange(self._most_pages, device=q.device)
        ids = tables.pages[torch.minimum(place, behind[:, None] - 1).clamp(min=0)]
        seen = torch.arange(self._most_pages * size, device=q.device) <= position[:, None]
        keys, values = (_tokens(part, ids, seen) for part in paged_kv_cache)
        return self._attend(q, keys, values, seen)

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """`keys` and `values` `[queries, kv_heads, keys, head_dim]`, `seen` `[queries, keys]`."""
        grouped = q.float().view(len(q), keys.shape[1], -1, q.shape[2])
        scores = grouped @ keys.transpose(2, 3) * self._scores.scaling
        if self._scores.softcap:
            scores = self._scores.softcap * torch.tanh(scores / self._scores.softcap)
        weights = torch.softmax(scores.masked_fill(~seen[:, None, None], float("-inf")), dim=-1)
        return (weights @ values).flatten(1, 2).to(q.dtype)


def _tokens(pages: torch.Tensor, ids: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """`[queries, kv_heads, keys, head_dim]` in float32; zero where it is not seen, whatever lies there."""
    tokens = pages[ids].float().transpose(1, 2).flatten(2, 3)
    return tokens.masked_fill(~seen[:, None, :, None], 0.0)


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
        given = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        starts, pages, last = given
        assert all((part is not None) == use_cuda_graph for part in given)
        buffers = None
        if starts is not None and pages is not None and last is not None:
            buffers = Tables(torch.arange(len(starts), dtype=torch.int32, device=starts.device), starts, pages, last)
        super().__init__(kv_layout, float_workspace_buffer, buffers)

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
        queries = torch.arange(len(indptr), dtype=torch.int32)
        self._keep(Tables(queries, indptr, indices, last_page_len), Scores(sm_scale, logits_soft_cap))


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
        given = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        assert all((part is not None) == use_cuda_graph for part in given)
        buffers = Tables(*(part for part in given if part is not None)) if use_cuda_graph else None
        super().__init__(kv_layout, float_workspace_buffer, buffers)
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
        tables = Tables(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._keep(tables, Scores(sm_scale, logits_soft_cap))
