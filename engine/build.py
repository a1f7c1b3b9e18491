"""Puts an engine together from its parts."""

import logging

import torch

from engine.attention.choice import choose_backend
from engine.cache_manager import CacheManager
from engine.cache_pool import DTYPES, CachePool
from engine.config import ContinuousBatchingConfig
from engine.engine import Engine, EngineParts
from engine.geometry import CacheGeometry
from engine.kv_cache import PagedKVCache
from engine.limits import Limits
from engine.memory import available_memory
from engine.model_runner import ModelRunner
from engine.models.choice import choose_model
from engine.models.loading import LoadedModel, load_model
from engine.options import EngineOptions
from engine.progress import ProgressWord
from engine.runner import Runner
from engine.sizing import MemoryBudget, choose_chunks, default_memory_share, offload_chunks
from engine.threaded_runner import ThreadedRunner

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


def build_engine(options: EngineOptions, head: bool) -> Engine:
    """`head` False: for a node that never samples. Raises ModelRefused; MemoryError if the sizes asked for do not
    fit."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return assemble(load_model(options.model, head=head), options.batching)


def assemble(loaded: LoadedModel, config: ContinuousBatchingConfig) -> Engine:
    """An engine of its own pool around a loaded model. A model serves one engine only: its layers move one word."""
    if config.use_cuda_graph:
        log.warning("use_cuda_graph: this engine runs on a CPU, where nothing is captured")
    geometry, asynchronous = loaded.geometry(config.page_size), bool(config.use_async_batching)
    pool = CachePool(geometry, _chunks(loaded, config, geometry, asynchronous), config.debug_pages)
    progress = ProgressWord()
    limits = Limits(loaded.vocab_size, loaded.max_positions, CacheManager(pool).max_tokens, loaded.eos_token_ids)
    parts = EngineParts(
        pool=pool,
        runner=_runner(loaded, pool, progress, asynchronous),
        progress=progress,
        limits=limits,
        host_pool=_host_pool(config, geometry),
        asynchronous=asynchronous,
        namespace=loaded.dtype,
    )
    return Engine(config, parts)


def _chunks(loaded: LoadedModel, config: ContinuousBatchingConfig, geometry: CacheGeometry, asynchronous: bool) -> int:
    share = config.max_memory_percent or default_memory_share(CPU.type, processors=True)
    use = loaded.sizes.on_cpu(geometry, config.request_cap, asynchronous)
    return choose_chunks(use, MemoryBudget(available_memory(CPU), share), config.batch_tokens, config.num_blocks)


def _host_pool(config: ContinuousBatchingConfig, geometry: CacheGeometry) -> CachePool | None:
    if config.cpu_offload_space == 0.0:
        return None
    threshold, available = config.cpu_offload_space_safety_threshold, available_memory(CPU)
    chunks = offload_chunks(config.cpu_offload_space, threshold, available, geometry)
    if not chunks:
        log.warning("cpu_offload_space holds not even one chunk of %d bytes: off", geometry.chunk_bytes)
        return None
    return CachePool(geometry, chunks, reserved=0)


def _runner(loaded: LoadedModel, pool: CachePool, progress: ProgressWord, asynchronous: bool) -> Runner:
    backend, why = choose_backend(PagedKVCache(pool), DTYPES[loaded.dtype])
    log.info("attention: %s", why)
    model, why = choose_model(loaded.model, backend, progress)
    log.info("model: %s", why)
    runner = ModelRunner(model, backend, loaded.eos_token_ids)
    return ThreadedRunner(runner) if asynchronous else runner
