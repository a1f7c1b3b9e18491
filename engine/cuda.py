"""How an engine runs on CUDA: which attention, what is captured, and the runner around it. Everything else about the
engine is as on a CPU."""

import importlib
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from engine.attention.base import AttentionBackend
from engine.attention.flashinfer import FlashInferAttention, scores_of, unsupported
from engine.attention.flashinfer_plans import FLOAT_WORKSPACE_BYTES, StaticSizes
from engine.attention.torch_paged import TorchPagedAttention
from engine.cache_pool import DTYPES, CachePool
from engine.config import DEFAULT_KV_PADDING, DEFAULT_Q_PADDING, ContinuousBatchingConfig
from engine.cuda_graphs import CudaCapture
from engine.device_runner import DeviceRunner, DeviceSizes, Graphs, Planner
from engine.forward_batch import ForwardBatch
from engine.geometry import CacheGeometry
from engine.kv_cache import PagedKVCache
from engine.models.binding import BoundModel
from engine.models.loading import LoadedModel
from engine.modes import Modes, choose_modes
from engine.padding import GraphKey, Padding
from engine.progress import ProgressWord
from engine.sizing import MemoryUse
from engine.streams import CudaStreams
from protocol.context import NO_CONTEXT, ContextLayout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CudaChoice:
    """`kernels`: the flashinfer module; None: attention runs in plain torch, which cannot be captured."""

    kernels: Any | None
    modes: Modes

    def memory_use(self, loaded: LoadedModel, geometry: CacheGeometry, config: ContinuousBatchingConfig) -> MemoryUse:
        asynchronous = self.modes.asynchronous
        if self.kernels is None:
            return loaded.sizes.on_cpu(geometry, config.request_cap, asynchronous)
        return loaded.sizes.on_cuda(geometry, config.request_cap, asynchronous, FLOAT_WORKSPACE_BYTES)


def installed_kernels() -> Any | None:
    """The flashinfer module, if there is one."""
    return importlib.import_module("flashinfer") if find_spec("flashinfer") else None


def choose_cuda(
    loaded: LoadedModel, geometry: CacheGeometry, config: ContinuousBatchingConfig, kernels: Any | None
) -> CudaChoice:
    """`kernels`: what is installed. Raises ValueError where the configuration asks for what cannot be."""
    why = unsupported(geometry, scores_of(loaded.model)) if kernels else "flashinfer is not installed"
    if why:
        log.warning("attention runs in plain torch, slower: %s", why)
    modes = choose_modes(config, sliding=not geometry.is_full, uncapturable=why)
    return CudaChoice(None if why else kernels, modes)


def cuda_runner(
    loaded: LoadedModel,
    pool: CachePool,
    progress: ProgressWord,
    config: ContinuousBatchingConfig,
    choice: CudaChoice,
    resources: ExitStack,
    context: ContextLayout = NO_CONTEXT,
) -> DeviceRunner:
    """`loaded` is on the pool's device. `progress`: a word that the device advances. `resources`: closed with it."""
    cache = PagedKVCache(pool)
    padding = _padding(pool, config)
    backend, planners = _attention(cache, loaded, padding, choice)
    streams = CudaStreams(cache.device)
    capture = CudaCapture(streams.computing)
    modes = choice.modes
    return DeviceRunner(
        BoundModel(loaded.model, backend, progress),
        planners,
        streams,
        DeviceSizes(cache.device, DTYPES[loaded.dtype], loaded.vocab_size, padding.max_tokens, padding.max_requests),
        Graphs(padding, capture, modes.varlen, modes.decode) if modes.decode or modes.varlen else None,
        loaded.eos_token_ids,
        resources,
        context,
    )


def _padding(pool: CachePool, config: ContinuousBatchingConfig) -> Padding:
    return Padding(
        geometry=pool.geometry,
        max_tokens=config.batch_tokens,
        max_requests=config.request_cap,
        cache_tokens=pool.geometry.cache_tokens(pool.num_chunks),
        q_interval=config.q_padding_interval_size or DEFAULT_Q_PADDING,
        kv_interval=config.kv_padding_interval_size or DEFAULT_KV_PADDING,
    )


def _attention(
    cache: PagedKVCache, loaded: LoadedModel, padding: Padding, choice: CudaChoice
) -> tuple[AttentionBackend[Any], list[Planner]]:
    pairs = 2 if choice.modes.asynchronous else 1
    if choice.kernels is None:
        backend = TorchPagedAttention(cache, DTYPES[loaded.dtype])
        return backend, [_PlainPlanner(backend)] * pairs
    flash = FlashInferAttention(cache, loaded.sizes.heads, scores_of(loaded.model), choice.kernels)
    longest = min(loaded.max_positions, padding.cache_tokens)
    static = StaticSizes(padding.max_tokens, padding.max_rows, longest)
    return flash, [flash.planner(static) for _ in range(pairs)]


class _PlainPlanner:
    """A backend whose every plan is new."""

    def __init__(self, backend: AttentionBackend[Any]) -> None:
        self._backend = backend

    def plan(self, batch: ForwardBatch, key: GraphKey | None) -> Any:
        assert key is None, "plain torch is not captured"
        return self._backend.plan(batch)
