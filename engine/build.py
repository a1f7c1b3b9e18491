"""Puts an engine together from its parts."""

from dataclasses import replace

import torch

from engine.attention.torch_paged import TorchPagedAttention
from engine.cache_manager import CacheManager
from engine.cache_pool import DTYPES, CachePool
from engine.config import ContinuousBatchingConfig
from engine.engine import Engine, EngineParts
from engine.kv_cache import PagedKVCache
from engine.limits import Limits
from engine.model_runner import ModelRunner
from engine.models.binding import BoundModel
from engine.models.loading import LoadedModel, load_model
from engine.options import EngineOptions
from engine.progress import ProgressWord


def build_engine(options: EngineOptions, head: bool) -> Engine:
    """`head` False: for a node that never samples. There, prompts hold all their pages from admission and nothing
    grows, so no margin is kept. Raises ModelRefused."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    batching = options.batching if head else replace(options.batching, safety_margin=0.0)
    return assemble(load_model(options.model, head=head), batching)


def assemble(loaded: LoadedModel, config: ContinuousBatchingConfig) -> Engine:
    """An engine of its own pool around a loaded model. A model serves one engine only: its layers move one word."""
    geometry = loaded.geometry(config.page_size)
    assert config.num_blocks is not None
    pool = CachePool(geometry, geometry.chunks_for(config.num_blocks), config.debug_pages)
    progress = ProgressWord()
    backend = TorchPagedAttention(PagedKVCache(pool), DTYPES[loaded.dtype])
    runner = ModelRunner(BoundModel(loaded.model, backend, progress), backend)
    limits = Limits(loaded.vocab_size, loaded.max_positions, CacheManager(pool).max_tokens, loaded.eos_token_ids)
    return Engine(config, EngineParts(pool, runner, progress, limits))
