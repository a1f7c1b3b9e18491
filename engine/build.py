"""Puts an engine together from its parts."""

import logging
from dataclasses import dataclass

import torch

from engine.attention.choice import choose_backend
from engine.cache_pool import DTYPES, CachePool
from engine.config import ContinuousBatchingConfig
from engine.cuda import choose_cuda, cuda_runner, installed_kernels
from engine.engine import Engine, EngineParts
from engine.errors import NoDevice
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
from engine.sizing import MemoryBudget, MemoryUse, choose_chunks, default_memory_share, offload_chunks
from engine.threaded_runner import ThreadedRunner

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Placed:
    """What depends on the device: its pool, what runs there, whether forwards overlap."""

    pool: CachePool
    runner: Runner
    asynchronous: bool


def build_engine(options: EngineOptions, head: bool) -> Engine:
    """`head` False: for a node that never samples. Raises ModelRefused, NoDevice; MemoryError if the sizes asked for do
    not fit; ValueError if the device cannot do what was asked for."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise NoDevice("--device cuda: no GPU is there, or this torch was built without CUDA")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    loaded = load_model(options.model, options.dtype, head=head)
    return assemble(loaded, options.batching, torch.device(options.device))


def assemble(loaded: LoadedModel, config: ContinuousBatchingConfig, device: torch.device = CPU) -> Engine:
    """An engine of its own pool around a loaded model, which moves to `device`. A model serves one engine only: its
    layers move one word."""
    geometry, progress = loaded.geometry(config.page_size), ProgressWord()
    place = _on_cpu if device.type == "cpu" else _on_cuda
    placed = place(loaded, config, geometry, progress, device)
    tokens = geometry.max_tokens(placed.pool.num_chunks)
    parts = EngineParts(
        pool=placed.pool,
        runner=placed.runner,
        progress=progress,
        limits=Limits(loaded.vocab_size, loaded.max_positions, tokens, loaded.eos_token_ids),
        host_pool=_host_pool(config, placed.pool),
        asynchronous=placed.asynchronous,
        namespace=loaded.dtype,
    )
    return Engine(config, parts)


def _on_cpu(
    loaded: LoadedModel,
    config: ContinuousBatchingConfig,
    geometry: CacheGeometry,
    progress: ProgressWord,
    device: torch.device,
) -> Placed:
    if config.use_cuda_graph:
        log.warning("use_cuda_graph: this engine runs on a CPU, where nothing is captured")
    asynchronous = bool(config.use_async_batching)
    pool = _pool(loaded.sizes.on_cpu(geometry, config.request_cap, asynchronous), config, device)
    backend, why = choose_backend(PagedKVCache(pool), DTYPES[loaded.dtype])
    log.info("attention: %s", why)
    model, why = choose_model(loaded.model, backend, progress)
    log.info("model: %s", why)
    runner = ModelRunner(model, backend, loaded.eos_token_ids)
    return Placed(pool, ThreadedRunner(runner) if asynchronous else runner, asynchronous)


def _on_cuda(
    loaded: LoadedModel,
    config: ContinuousBatchingConfig,
    geometry: CacheGeometry,
    progress: ProgressWord,
    device: torch.device,
) -> Placed:
    loaded.model.to(device)
    choice = choose_cuda(loaded, geometry, config, installed_kernels())
    pool = _pool(choice.memory_use(loaded, geometry, config), config, device)
    return Placed(pool, cuda_runner(loaded, pool, progress, config, choice), choice.modes.asynchronous)


def _pool(use: MemoryUse, config: ContinuousBatchingConfig, device: torch.device) -> CachePool:
    """The model is on the device already: what is available is what it has left."""
    share = config.max_memory_percent or default_memory_share(device.type)
    budget = MemoryBudget(available_memory(device), share)
    chunks = choose_chunks(use, budget, config.batch_tokens, config.num_blocks)
    return CachePool(use.geometry, chunks, config.debug_pages, device=str(device))


def _host_pool(config: ContinuousBatchingConfig, pool: CachePool) -> CachePool | None:
    """Beside a pool that is in host memory itself, and has not touched all of it yet."""
    if config.cpu_offload_space == 0.0:
        return None
    available = available_memory(CPU) - (pool.bytes if pool.device == "cpu" else 0)
    threshold = config.cpu_offload_space_safety_threshold
    chunks = offload_chunks(config.cpu_offload_space, threshold, max(0, available), pool.geometry)
    if not chunks:
        log.warning("cpu_offload_space holds not even one chunk of %d bytes: off", pool.geometry.chunk_bytes)
        return None
    return CachePool(pool.geometry, chunks, reserved=0)
