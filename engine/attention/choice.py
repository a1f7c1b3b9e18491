"""Which attention backend serves a cache."""

import logging
from typing import Any, NamedTuple

import torch

from engine.attention.base import AttentionBackend
from engine.attention.c_paged import CPagedAttention
from engine.attention.torch_paged import TorchPagedAttention
from engine.errors import KernelsUnavailable
from engine.kv_cache import PagedKVCache

log = logging.getLogger(__name__)


class BackendChoice(NamedTuple):
    """`why`: for logs and reports."""

    backend: AttentionBackend[Any]
    why: str


def choose_backend(cache: PagedKVCache, dtype: torch.dtype) -> BackendChoice:
    """The fastest there is for this cache. `dtype`: the model's."""
    geometry, device = cache.geometry, next(iter(cache.layers.values())).keys.device.type
    if device != "cpu":
        why = f"there is no kernel for {device}"
    elif geometry.parts == 1:
        why = "there is no C kernel for latent vectors (MLA)"
    elif not CPagedAttention.supports(geometry):
        why = f"there is no C kernel for {geometry.dtype} and heads of {geometry.head_dim}"
    else:
        try:
            backend = CPagedAttention(cache)
            return BackendChoice(backend, f"C kernels, {backend.variant}")
        except KernelsUnavailable as error:
            why = str(error)
            log.warning("attention runs in plain torch, slower: %s", why)
    return BackendChoice(TorchPagedAttention(cache, dtype), f"torch: {why}")
