"""Putting an engine together: how large its cache is, what runs it on a CPU, and what else it consists of."""

import logging
from dataclasses import dataclass

import torch

from engine.cache_pool import CachePool
from engine.config import ContinuousBatchingConfig
from engine.contexts import ContextSlots
from engine.cpu import cpu_runner
from engine.engine import Engine, EngineParts
from engine.limits import Limits
from engine.memory import available_memory
from engine.models.loading import LoadedModel
from engine.progress import ProgressWord
from engine.runner import Runner
from engine.sizing import MemoryBudget, MemoryUse, choose_chunks, default_memory_share, gib, offload_chunks
from engine.threaded_runner import ThreadedRunner
from protocol.context import NO_CONTEXT, ContextLayout

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Placed:
    """What depends on the devices: the pool, what runs there, whether forwards overlap."""

    pool: CachePool
    progress: ProgressWord
    runner: Runner
    asynchronous: bool


def count_chunks(use: MemoryUse, config: ContinuousBatchingConfig, device: torch.device, sharers: int = 1) -> int:
    """Of a rank's pool. The model is on the device already: what is available is what it has left, for as many as
    share it. Raises MemoryError, ValueError."""
    share = config.max_memory_percent or default_memory_share(device.type)
    budget = MemoryBudget(available_memory(device) // sharers, share)
    return choose_chunks(use, budget, config.batch_tokens, config.num_blocks)


def engine_of(
    loaded: LoadedModel,
    config: ContinuousBatchingConfig,
    placed: Placed,
    sharers: int = 1,
    context: ContextLayout = NO_CONTEXT,
) -> Engine:
    """`loaded`: a shard of the model that the ranks run. `context`: what the runner hands over of each prompt; as many
    are on their way at once as a forward may hold requests."""
    pool = placed.pool
    tokens = pool.geometry.max_tokens(pool.num_chunks)
    parts = EngineParts(
        pool=pool,
        runner=placed.runner,
        progress=placed.progress,
        limits=Limits(loaded.vocab_size, loaded.max_positions, tokens, loaded.eos_token_ids),
        host_pool=host_pool(config, pool, sharers),
        asynchronous=placed.asynchronous,
        namespace=loaded.dtype,
        kv_heads=loaded.kv.heads,
        contexts=ContextSlots(context, config.request_cap, config.debug_pages) if context.parts else None,
    )
    return Engine(config, parts)


def host_pool(config: ContinuousBatchingConfig, pool: CachePool, sharers: int) -> CachePool | None:
    """Beside a pool that is in host memory itself, and has not touched all of it yet. `sharers`: ranks, of this engine
    and of others, that want such a pool."""
    if config.cpu_offload_space == 0.0:
        return None
    available = available_memory(CPU) - (sharers * pool.bytes if pool.device == "cpu" else 0)
    space = config.cpu_offload_space
    chunks = offload_chunks(
        None if space is None else space / pool.ranks,
        config.cpu_offload_space_safety_threshold,
        max(0, available) // sharers,
        pool.geometry,
    )
    if not chunks:
        log.warning("cpu_offload_space holds not even one chunk of %d bytes: off", pool.geometry.chunk_bytes)
        return None
    size = gib(chunks * pool.geometry.chunk_bytes * pool.ranks)
    log.info("cpu_offload_space: %s of host memory for the KV of requests that make room", size)
    return CachePool(pool.geometry, chunks, reserved=0, ranks=pool.ranks)


def place_on_cpu(
    loaded: LoadedModel,
    config: ContinuousBatchingConfig,
    device: torch.device = CPU,
    sharers: int = 1,
    context: ContextLayout = NO_CONTEXT,
) -> Placed:
    """All of a model, in this process. `sharers`: ranks that share the machine's memory, this one among them.
    `context`: what is kept of rows that want one."""
    if config.use_cuda_graph:
        log.warning("use_cuda_graph: this engine runs on a CPU, where nothing is captured")
    geometry, progress, asynchronous = (
        loaded.geometry(config.page_size),
        ProgressWord(),
        bool(config.use_async_batching),
    )
    use = loaded.sizes.on_cpu(geometry, config.request_cap, asynchronous)
    pool = CachePool(geometry, count_chunks(use, config, device, sharers), config.debug_pages)
    runner = cpu_runner(loaded, pool, progress, context=context)
    return Placed(pool, progress, ThreadedRunner(runner) if asynchronous else runner, asynchronous)
