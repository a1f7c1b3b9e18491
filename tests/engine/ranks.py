"""The ranks of one model as threads of this process: each with its shard, its pool and its own attention."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch

from engine.attention.choice import choose_backend
from engine.cache_pool import CachePool
from engine.collective import Collective
from engine.forward_batch import BatchRow, ForwardBatch
from engine.kv_cache import PagedKVCache
from engine.models.base import ServedModel
from engine.models.choice import choose_model
from engine.models.loading import load_model
from engine.progress import ProgressWord
from engine.tensor_parallel import Shard

DEADLINE_S = 20.0
PAGE_SIZE = 4
BLOCKS = 32

Bind = Callable[[torch.nn.Module, Any, ProgressWord, Collective], ServedModel]


class MetAtBarriers:
    """A collective of threads. Counts its sums, by number of elements."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world, timeout=DEADLINE_S)
        self._parts: list[torch.Tensor] = []
        self.sums: list[int] = []

    def sum(self, tensor: torch.Tensor) -> None:
        self._parts.append(tensor.clone())
        if self._barrier.wait() == 0:
            self._total = torch.stack(self._parts).sum(0)
            self.sums.append(tensor.numel())
            self._parts.clear()
        self._barrier.wait()
        tensor.copy_(self._total)


class RankThread:
    """One rank's model; the chunk order of its pool is every rank's."""

    def __init__(self, folder: Path, shard: Shard, collective: Collective, bind: Bind | None) -> None:
        loaded = load_model(folder, head=shard.is_main, shard=shard)
        self.pool = CachePool(loaded.geometry(PAGE_SIZE), BLOCKS, debug_pages=True)
        self.backend = choose_backend(PagedKVCache(self.pool), torch.float32).backend
        self.progress = ProgressWord()
        if bind:
            self.model = bind(loaded.model, self.backend, self.progress, collective)
        else:
            self.model = choose_model(loaded.model, self.backend, self.progress, collective).model

    @torch.inference_mode()
    def run(self, row: BatchRow, wanted: Sequence[int], logits: bool) -> torch.Tensor:
        """Logits, or final states, of the row's tokens at `wanted`."""
        plan = self.backend.plan(ForwardBatch([row]))
        inputs = torch.tensor(row.tokens), torch.arange(row.start, row.end), plan
        forward = self.model.logits if logits else self.model.hidden
        return forward(*inputs, torch.tensor(wanted, dtype=torch.long))


class RankThreads:
    """`bind`: how the model is run; None: as an engine would choose."""

    def __init__(self, folder: Path, world: int, bind: Bind | None = None) -> None:
        self.collective = MetAtBarriers(world)
        self.ranks = [RankThread(folder, Shard(rank, world), self.collective, bind) for rank in range(world)]
        self._threads = ThreadPoolExecutor(world)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def run(self, tokens: Sequence[int], start: int, wanted: Sequence[int], head: bool = True) -> list[torch.Tensor]:
        """One forward on all ranks; the main one's logits (with `head`), the others' final states."""
        row = BatchRow("A", start, list(tokens), self.tables)
        runs = [
            self._threads.submit(rank.run, row, wanted, head and number == 0) for number, rank in enumerate(self.ranks)
        ]
        return [run.result(DEADLINE_S) for run in runs]

    @property
    def tables(self) -> list[list[int]]:
        """Of the one sequence: blocks out of order, for each group its own."""
        per_chunk = self.ranks[0].pool.geometry.blocks_per_chunk
        half = BLOCKS // len(per_chunk)
        return [
            [2 * count + (7 * place) % (half * count) + group * half * count for place in range(half * count)]
            for group, count in enumerate(per_chunk)
        ]

    def greedy(self, prompt: list[int], count: int, cut: int) -> list[int]:
        """The prompt in two chunks, the first of `cut` tokens, then token by token."""
        self.run(prompt[:cut], 0, [])
        tokens, start = list(prompt), cut
        while len(tokens) < len(prompt) + count:
            logits = self.run(tokens[start:], start, [len(tokens) - start - 1])[0]
            start = len(tokens)
            tokens.append(int(logits[0].argmax()))
        return tokens[len(prompt) :]
