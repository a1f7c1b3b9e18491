"""Runners under test: a real tiny model, its pages, and sequences that are run by hand, forward by forward."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.attention.base import AttentionScores
from engine.attention.torch_paged import TorchPagedAttention
from engine.cache_pool import CachePool
from engine.forward_batch import PLACEHOLDER, BatchRow, ForwardBatch, SampleStream
from engine.kv_cache import PagedKVCache
from engine.models.binding import BoundModel
from engine.models.loading import LoadedModel, load_model
from engine.progress import ProgressWord
from engine.runner import ForwardResult, SampledToken
from protocol.layout import DType
from protocol.sampling import SamplingParams

PAGE_SIZE = 4
MAX_LENGTH = 48
DEADLINE_S = 20.0
GREEDY = SamplingParams(max_new_tokens=MAX_LENGTH)


class Hooked(TorchPagedAttention):
    """Waits at the gate before each forward's first layer, and raises there when told to."""

    def __init__(self, cache: PagedKVCache, dtype: torch.dtype) -> None:
        super().__init__(cache, dtype)
        self.gate = threading.Event()
        self.gate.set()
        self.fail_next = False
        self.plans = 0

    def plan(self, batch: ForwardBatch) -> Any:
        self.plans += 1
        return super().plan(batch)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: Any,
        scores: AttentionScores,
    ) -> torch.Tensor:
        if layer == 0:
            assert self.gate.wait(DEADLINE_S), "the gate was never opened"
            if self.fail_next:
                self.fail_next = False
                raise RuntimeError("the device fell over")
        return super().attend(layer, query, keys, values, plan, scores)


class Bench:
    """A model bound to a pool whose pages are NaN until written."""

    dtype: DType = "float32"

    def __init__(
        self,
        directory: Path,
        sequences: int = 8,
        max_length: int = MAX_LENGTH,
        progress: ProgressWord | None = None,
    ) -> None:
        loaded = load_model(directory, self.dtype)
        self.geometry = loaded.geometry(PAGE_SIZE)
        pages = -(-max_length // PAGE_SIZE)
        self.pool = CachePool(self.geometry, sequences * pages * len(self.geometry.groups), debug_pages=True)
        self.cache = PagedKVCache(self.pool)
        self.backend = self.attention(loaded)
        self.progress = progress or ProgressWord()
        self.model = BoundModel(loaded.model, self.backend, self.progress)
        self._pages = pages

    def attention(self, loaded: LoadedModel) -> Any:
        return Hooked(self.cache, torch.float32)

    def sequence(self, request_id: str, prompt: Sequence[int], params: SamplingParams = GREEDY) -> "RunSequence":
        """With pages for its whole life, out of order."""
        tables = []
        for per_chunk in self.geometry.blocks_per_chunk:
            chunks = [self.pool.take() for _ in range(-(-self._pages // per_chunk))]
            blocks = [chunk * per_chunk + i for chunk in chunks for i in range(per_chunk)]
            tables.append(blocks[::2] + blocks[1::2])
        return RunSequence(request_id, list(prompt), tables, params)


class RunSequence:
    """One request, as an engine would keep its books."""

    def __init__(self, request_id: str, prompt: list[int], tables: Sequence[list[int]], params: SamplingParams) -> None:
        self.id = request_id
        self.tokens = prompt
        self.prompt_length = len(prompt)
        self.tables = tables
        self.params = params
        self.past = 0

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def row(self, count: int | None = None) -> BatchRow:
        """The next `count` tokens, by default all that are known and not yet in KV."""
        end = len(self.tokens) if count is None else self.past + count
        row = BatchRow(self.id, self.past, self.tokens[self.past : end], self.tables, self._samples(end))
        self.past = end
        return row

    def carried_row(self, source: int) -> BatchRow:
        """Of a token that the forward before is still choosing, as its sample number `source`."""
        row = BatchRow(self.id, self.past, [PLACEHOLDER], self.tables, self._samples(self.past + 1), source)
        self.past += 1
        return row

    def take(self, token: SampledToken | str) -> None:
        assert isinstance(token, SampledToken), token
        self.tokens.append(token.token)

    def _samples(self, end: int) -> SampleStream | None:
        """The history is the live list, as the engine's is: without the token that is still being chosen."""
        return SampleStream(self.params, 7, self.tokens, self.prompt_length) if end >= len(self.tokens) else None


def batch(*rows: BatchRow) -> ForwardBatch:
    return ForwardBatch(rows)


def texts(result: ForwardResult) -> list[str]:
    return [token for token in result.tokens if isinstance(token, str)]
