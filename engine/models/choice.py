"""Which of the two ways to run a model serves it here."""

import logging
from typing import Any, NamedTuple

import torch

from engine.attention.base import AttentionBackend
from engine.collective import Collective
from engine.errors import KernelsUnavailable
from engine.models.base import ServedModel
from engine.models.binding import BoundModel
from engine.models.dense import DenseKernels
from engine.models.llama_like import LlamaLikeModel, why_not
from engine.progress import ProgressWord

log = logging.getLogger(__name__)


class ModelChoice(NamedTuple):
    """`why`: for logs and reports."""

    model: ServedModel
    why: str


def choose_model(
    model: torch.nn.Module,
    backend: AttentionBackend[Any],
    progress: ProgressWord,
    collective: Collective | None = None,
) -> ModelChoice:
    """The fastest there is for this model, or shard of one (`collective`). It is the only user of `progress`."""
    reason = why_not(model)
    if reason is None:
        try:
            kernels = DenseKernels()
            served = LlamaLikeModel(model, backend, progress, kernels, collective)
            return ModelChoice(served, f"C kernels, {kernels.variant}")
        except KernelsUnavailable as error:
            log.warning("the model runs in plain torch, slower: %s", error)
            reason = str(error)
    else:
        reason = f"the C kernels do not cover {reason}"
    return ModelChoice(BoundModel(model, backend, progress, collective), f"transformers' modules: {reason}")
