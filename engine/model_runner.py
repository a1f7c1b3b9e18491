"""Runs one forward of a batch and chooses the next tokens."""

from typing import Any, Protocol

import torch

from engine.attention.base import AttentionBackend
from engine.forward_batch import ForwardBatch
from engine.models.binding import BoundModel
from engine.sampler import sample


class Runner(Protocol):
    """The engine's view of a device. Raises whatever the device raises: the batch has then failed as a whole."""

    def run(self, batch: ForwardBatch) -> list[int | None]:
        """One token per entry of `batch.samples`, in order; None where the model's output was not finite."""


class ModelRunner:
    """A model without a head takes only batches that want no samples."""

    def __init__(self, model: BoundModel, backend: AttentionBackend[Any]) -> None:
        self._model = model
        self._backend = backend

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> list[int | None]:
        plan = self._backend.plan(batch)
        token_ids = torch.tensor([token for row in batch.rows for token in row.tokens])
        positions = torch.tensor([position for row in batch.rows for position in range(row.start, row.end)])
        keys = batch.samples
        if not keys:
            self._model.hidden(token_ids, positions, plan)
            return []
        return sample(self._model.logits(token_ids, positions, plan, _last_tokens(batch)), keys)


def _last_tokens(batch: ForwardBatch) -> torch.Tensor:
    """Where, among the packed tokens, the rows that want a token end."""
    ends, position = [], 0
    for row in batch.rows:
        position += len(row.tokens)
        if row.sample:
            ends.append(position - 1)
    return torch.tensor(ends)
