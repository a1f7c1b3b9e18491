"""Puts an engine together from its parts."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from engine.config import ContinuousBatchingConfig
from engine.cuda import installed_kernels
from engine.cuda_driver import installed_driver
from engine.cuda_memory import can_reach_nic
from engine.cuda_placing import place_on_cuda
from engine.engine import Engine
from engine.errors import DeviceRefused, NoDevice
from engine.models.loading import LoadedModel, load_model
from engine.options import EngineOptions
from engine.placing import CPU, engine_of, place_on_cpu
from engine.workers.build import build_parallel
from protocol.context import NO_CONTEXT, ContextLayout

log = logging.getLogger(__name__)


def build_engine(options: EngineOptions, head: bool) -> Engine:
    """`head` False: for a node that never samples; where logits are kept as contexts, it has one all the same. Raises
    ModelRefused, NoDevice; MemoryError if the sizes asked for do not fit; ValueError if the device cannot do what was
    asked for; DeviceLost if a worker died on the way.

    With `options.tp`, the engine's workers live no longer than the thread that calls this.
    """
    return build_engines(options, head, 1)[0]


def build_engines(options: EngineOptions, head: bool, count: int) -> list[Engine]:
    """As `build_engine`: engines of the same model that share this machine, each for requests of its own. The first one
    computes in this process, the others in workers alone."""
    _check_present(options.device)
    head = head or "logits" in options.context
    if options.tp * count > 1:
        if options.device != "cpu":
            raise ValueError(
                f"--device {options.device}: several devices are supported on CPU only: leave out --tp and --dp"
            )
        return build_parallel(options, head, count)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    loaded = load_model(options.model, options.dtype, head=head)
    return [assemble(loaded, options.batching, torch.device(options.device), context=loaded.context(options.context))]


def check_movable(options: EngineOptions) -> None:
    """Of a node's device, before its engines are built: raises NoDevice; DeviceRefused where a NIC could not read and
    write their pages, or a setting has the host read them."""
    if options.device == "cpu":
        return
    if options.batching.debug_pages:
        raise DeviceRefused("--debug-pages compares pages in the host's memory: leave it out with --device cuda")
    _check_present(options.device)
    if why := can_reach_nic(installed_driver(), 0):
        raise DeviceRefused(why)


def device_addresses(options: EngineOptions) -> list[str]:
    """PCI addresses of the GPUs whose memory the engines' pages lie in; none on a CPU."""
    return [] if options.device == "cpu" else [installed_driver().pci_address(0)]


def _check_present(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise NoDevice("--device cuda: no GPU is there, or this torch was built without CUDA")


def assemble(
    loaded: LoadedModel,
    config: ContinuousBatchingConfig,
    device: torch.device = CPU,
    kernels: Callable[[], Any | None] = installed_kernels,
    context: ContextLayout = NO_CONTEXT,
) -> Engine:
    """An engine of its own pool around a loaded model, which moves to `device`. A model serves one engine only: its
    layers move one word. `kernels`: on CUDA, where FlashInfer comes from; None of them: plain torch. `context`: what is
    kept of the position before each prompt's last token."""
    if device.type == "cpu":
        placed = place_on_cpu(loaded, config, device, context=context)
    else:
        placed = place_on_cuda(loaded, config, device, kernels(), installed_driver(), context)
    return engine_of(loaded, config, placed, context=context)
