"""Puts an engine together from its parts."""

import logging

import torch

from engine.cache_pool import CachePool
from engine.config import ContinuousBatchingConfig
from engine.cuda import choose_cuda, cuda_runner, installed_kernels
from engine.engine import Engine
from engine.errors import NoDevice
from engine.models.loading import LoadedModel, load_model
from engine.options import EngineOptions
from engine.placing import CPU, Placed, count_chunks, engine_of, place_on_cpu
from engine.progress import ProgressWord
from engine.workers.build import build_parallel

log = logging.getLogger(__name__)


def build_engine(options: EngineOptions, head: bool) -> Engine:
    """`head` False: for a node that never samples. Raises ModelRefused, NoDevice; MemoryError if the sizes asked for do
    not fit; ValueError if the device cannot do what was asked for; DeviceLost if a worker died on the way.

    With `options.tp`, the engine's workers live no longer than the thread that calls this.
    """
    return build_engines(options, head, 1)[0]


def build_engines(options: EngineOptions, head: bool, count: int) -> list[Engine]:
    """As `build_engine`: engines of the same model that share this machine, each for requests of its own. The first one
    computes in this process, the others in workers alone."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise NoDevice("--device cuda: no GPU is there, or this torch was built without CUDA")
    if options.tp * count > 1:
        if options.device != "cpu":
            raise ValueError(f"--device {options.device}: several devices are supported on CPU only: leave out --tp")
        return build_parallel(options, head, count)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    loaded = load_model(options.model, options.dtype, head=head)
    return [assemble(loaded, options.batching, torch.device(options.device))]


def assemble(loaded: LoadedModel, config: ContinuousBatchingConfig, device: torch.device = CPU) -> Engine:
    """An engine of its own pool around a loaded model, which moves to `device`. A model serves one engine only: its
    layers move one word."""
    place = place_on_cpu if device.type == "cpu" else _on_cuda
    return engine_of(loaded, config, place(loaded, config, device))


def _on_cuda(loaded: LoadedModel, config: ContinuousBatchingConfig, device: torch.device) -> Placed:
    geometry, progress = loaded.geometry(config.page_size), ProgressWord()
    loaded.model.to(device)
    choice = choose_cuda(loaded, geometry, config, installed_kernels())
    chunks = count_chunks(choice.memory_use(loaded, geometry, config), config, device)
    pool = CachePool(geometry, chunks, config.debug_pages, device=str(device))
    return Placed(pool, progress, cuda_runner(loaded, pool, progress, config, choice), choice.modes.asynchronous)
