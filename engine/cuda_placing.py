"""Putting an engine on a CUDA device: pages that NICs and other processes can be given, a word that it advances, and
what runs it."""

from contextlib import ExitStack
from typing import Any

import torch

from engine.cache_pool import CachePool, aligned, pool_bytes
from engine.config import ContinuousBatchingConfig
from engine.cuda import choose_cuda, cuda_runner
from engine.cuda_driver import CudaDriver
from engine.cuda_memory import allocate
from engine.device_progress import DeviceProgressWord
from engine.models.loading import LoadedModel
from engine.placing import Placed, count_chunks
from protocol.context import NO_CONTEXT, ContextLayout


def place_on_cuda(
    loaded: LoadedModel,
    config: ContinuousBatchingConfig,
    device: torch.device,
    kernels: Any | None,
    driver: CudaDriver,
    context: ContextLayout = NO_CONTEXT,
) -> Placed:
    """All of a model, which moves to `device`. `kernels`: the flashinfer module, or None. The runner owns the pages and
    the word: its `close` gives them back. Raises DeviceRefused, MemoryError, ValueError."""
    geometry, ordinal = loaded.geometry(config.page_size), device.index or 0
    loaded.model.to(device)
    choice = choose_cuda(loaded, geometry, config, kernels)
    chunks = count_chunks(choice.memory_use(loaded, geometry, config), config, device)
    size = aligned(pool_bytes(geometry, chunks))
    resources = ExitStack()
    with ExitStack() as undo:
        undo.callback(resources.close)
        progress = resources.enter_context(DeviceProgressWord(driver))
        progress.map(ordinal)
        pages = resources.enter_context(allocate(driver, ordinal, size)).tensor()[:size].zero_()
        pool = CachePool(geometry, chunks, config.debug_pages, device=f"cuda:{ordinal}", memory=pages)
        runner = cuda_runner(loaded, pool, progress, config, choice, resources, context)
        undo.pop_all()
    return Placed(pool, progress, runner, choice.modes.asynchronous)
