"""Models that run on pages of their own, without an engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.attention.torch_paged import TorchPagedAttention
from engine.cache_pool import CachePool
from engine.forward_batch import BatchRow, ForwardBatch
from engine.kv_cache import PagedKVCache
from engine.models.base import ServedModel
from engine.models.loading import LoadedModel
from engine.progress import ProgressWord
from tests.engine.tiny_models import prompt_of

PAGE_SIZE = 4


def randomise_vectors(folder: Path) -> None:
    """Biases start as zeros and norms as ones: both would hide that they were left out."""
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(5)
    tensors = load_file(file)
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.3)
    save_file(tensors, file, {"format": "pt"})


class Paged:
    """A loaded model with a pool of its own, and three requests whose tables are fixed."""

    tables = ([7, 3, 12, 2, 9, 14, 5, 21], [6, 4, 11, 8, 16, 17, 18, 22], [10, 15, 13, 19, 20, 23, 24, 25])

    def __init__(self, loaded: LoadedModel, bind: Callable[..., ServedModel]) -> None:
        self.pool = CachePool(loaded.geometry(PAGE_SIZE), 32, debug_pages=True)
        self.backend = TorchPagedAttention(PagedKVCache(self.pool), torch.float32)
        self.progress = ProgressWord()
        self.model = bind(loaded.model, self.backend, self.progress)

    def inputs(self, cuts: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, Any]:
        rows = [
            BatchRow(str(i), start, prompt_of(30, seed=i)[start:end], [self.tables[i]])
            for i, (start, end) in enumerate(cuts)
        ]
        tokens = [token for row in rows for token in row.tokens]
        positions = [position for row in rows for position in range(row.start, row.end)]
        return torch.tensor(tokens), torch.tensor(positions), self.backend.plan(ForwardBatch(rows))

    @torch.inference_mode()
    def hidden(self, cuts: list[tuple[int, int]]) -> torch.Tensor:
        return self.model.hidden(*self.inputs(cuts), torch.arange(sum(end - start for start, end in cuts)))

    @torch.inference_mode()
    def logits(self, cuts: list[tuple[int, int]], rows: list[int]) -> torch.Tensor:
        return self.model.logits(*self.inputs(cuts), torch.tensor(rows, dtype=torch.long))
