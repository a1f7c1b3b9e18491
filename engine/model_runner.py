"""Runs one forward of a batch and chooses the next tokens."""

import time
from collections.abc import Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.base import AttentionBackend
from engine.forward_batch import ForwardBatch
from engine.futures import settled
from engine.models.base import ServedModel
from engine.padding import Padding
from engine.prepared_forward import PreparedForward, Samples, prepare_forward
from engine.runner import ForwardResult
from engine.sampler import sample_tokens


@dataclass(frozen=True)
class PlannedForward:
    """What `ModelRunner.forward` takes: independent of the batch it was made from."""

    inputs: PreparedForward
    plan: Any


class ModelRunner:
    """The synchronous runner: a forward has run when `launch` returns. A model without a head takes only batches that
    want no samples.

    The two halves of `launch` may be called by different threads, one each: `prepare` reads the batch, `forward` runs
    the model. Forwards run in the order of their batches: one may carry tokens of the one before. `end_tokens`: the
    model's own, which min_tokens forbids. `padding`: run the shapes that captured forwards would have; on a CPU that
    only shows that padding changes nothing. `chooses` False: another rank chooses the tokens; this one reports none.
    """

    def __init__(
        self,
        model: ServedModel,
        backend: AttentionBackend[Any],
        end_tokens: Set[int] = frozenset(),
        padding: Padding | None = None,
        chooses: bool = True,
    ) -> None:
        self._model = model
        self._backend = backend
        self._end_tokens = end_tokens
        self._padding = padding
        self._chooses = chooses
        self._previous: Samples | None = []

    def launch(self, batch: ForwardBatch) -> "Future[ForwardResult]":
        return settled(self.forward, self.prepare(batch))

    def prepare(self, batch: ForwardBatch) -> "Future[PlannedForward]":
        """Ended, well or not; what went wrong is raised by the forward."""
        return settled(self._plan, self._padding.pad(batch).batch if self._padding else batch)

    @torch.inference_mode()
    def forward(self, prepared: "Future[PlannedForward]") -> ForwardResult:
        previous, self._previous = self._previous, None
        work = prepared.result()
        started = time.monotonic_ns()
        work.inputs.fill(previous)
        tokens = work.inputs.without_void(self._run(work.inputs, work.plan), previous)
        self._previous = tokens
        return ForwardResult(tokens, started, time.monotonic_ns())

    def close(self) -> None:
        self._model.close()

    def _plan(self, batch: ForwardBatch) -> PlannedForward:
        return PlannedForward(prepare_forward(batch), self._backend.plan(batch))

    def _run(self, inputs: PreparedForward, plan: Any) -> Samples:
        if not inputs.keys or not self._chooses:
            self._model.hidden(inputs.token_ids, inputs.positions, plan, inputs.ends)
            return []
        logits = self._model.logits(inputs.token_ids, inputs.positions, plan, inputs.ends)
        return sample_tokens(logits, inputs.keys, self._end_tokens)
