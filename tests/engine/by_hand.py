"""A model run forward by forward over block tables made by hand: no engine, no scheduler, no allocator."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from engine.attention.base import AttentionScores
from engine.attention.torch_paged import TorchPagedAttention, TorchPlan
from engine.cache_pool import DTYPES, CachePool
from engine.forward_batch import BatchRow, ForwardBatch
from engine.kv_cache import PagedKVCache
from engine.models.binding import BoundModel
from engine.models.loading import load_model
from engine.progress import ProgressWord
from protocol.layout import DType

LENGTH = 64
"""Tokens that each request's tables have room for."""


class Watched(TorchPagedAttention):
    """Keeps how each layer asked for its scores, and lets a test leave something out of them."""

    def __init__(self, cache: PagedKVCache, dtype: torch.dtype) -> None:
        super().__init__(cache, dtype)
        self.asked: dict[int, AttentionScores] = {}
        self.instead: dict[str, float | None] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: TorchPlan,
        scores: AttentionScores,
    ) -> torch.Tensor:
        self.asked[layer] = scores
        scores = replace(scores, **self.instead)  # type: ignore[arg-type]  # a test names fields of it
        return super().attend(layer, query, keys, values, plan, scores)


class ByHand:
    """Unwritten slots are NaN."""

    def __init__(
        self, directory: Path, requests: Sequence[str] = "A", page_size: int = 4, dtype: DType = "float32"
    ) -> None:
        loaded = load_model(directory, dtype)
        geometry = loaded.geometry(page_size)
        pages = [group.pages_for(LENGTH, page_size) for group in geometry.groups]
        chunks = [-(-count // per) for count, per in zip(pages, geometry.blocks_per_chunk, strict=True)]
        self.pool = CachePool(geometry, len(requests) * sum(chunks), debug_pages=True)
        self.tables = {
            request: [
                self._blocks(count, per)[:held]
                for count, per, held in zip(chunks, geometry.blocks_per_chunk, pages, strict=True)
            ]
            for request in requests
        }
        self.written = dict.fromkeys(requests, 0)
        self.progress = ProgressWord()
        self.backend = Watched(PagedKVCache(self.pool), DTYPES[dtype])
        self._model = BoundModel(loaded.model, self.backend, self.progress)

    @torch.inference_mode()
    def forward(self, new: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """`[vocab]` of the last token of each request in the batch."""
        rows = [BatchRow(request, self.written[request], new[request], self.tables[request]) for request in new]
        positions = [position for row in rows for position in range(row.start, row.end)]
        ends = torch.tensor([len(row.tokens) for row in rows]).cumsum(0) - 1
        tokens = torch.tensor([token for row in rows for token in row.tokens])
        plan = self.backend.plan(ForwardBatch(rows))
        logits = self._model.logits(tokens, torch.tensor(positions), plan, ends)
        self.written |= {row.request_id: row.end for row in rows}
        return dict(zip(new, logits, strict=True))

    def greedy(self, prompts: Mapping[str, Sequence[int]], count: int, budget: int) -> dict[str, list[int]]:
        """`count` tokens of each, all in one batch, prompts in chunks of at most `budget` tokens a request."""
        sequences = {request: list(prompt) for request, prompt in prompts.items()}
        ends = {request: len(prompt) + count for request, prompt in prompts.items()}
        while live := [request for request in sequences if len(sequences[request]) < ends[request]]:
            new = {request: sequences[request][self.written[request] :][:budget] for request in live}
            for request, logits in self.forward(new).items():
                if self.written[request] == len(sequences[request]):
                    sequences[request].append(int(logits.argmax()))
        return {request: sequences[request][len(prompt) :] for request, prompt in prompts.items()}

    def _blocks(self, chunks: int, per_chunk: int) -> list[int]:
        """Of newly taken chunks, last first: a table is in no order."""
        taken = [self.pool.take() for _ in range(chunks)]
        return [chunk * per_chunk + block for chunk in reversed(taken) for block in reversed(range(per_chunk))]
