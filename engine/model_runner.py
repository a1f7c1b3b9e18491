"""Runs one forward of a batch and chooses the next tokens."""

import time
from collections.abc import Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.base import AttentionBackend
from engine.contexts import pack
from engine.forward_batch import ForwardBatch
from engine.futures import settled
from engine.models.base import ServedModel, run_for
from engine.padding import Padding
from engine.prepared_forward import PreparedForward, Samples, prepare_forward
from engine.runner import ForwardResult, Runner
from engine.sampler import sample_tokens
from protocol.context import NO_CONTEXT, ContextLayout


@dataclass(frozen=True)
class PlannedForward:
    """What `ModelRunner.forward` takes: independent of the batch it was made from."""

    inputs: PreparedForward
    plan: Any


class ModelRunner(Runner):
    """The synchronous runner: a forward has run when `launch` returns. A model without a head takes only batches that
    want no samples.

    The two halves of `launch` may be called by different threads, one each: `prepare` reads the batch, `forward` runs
    the model. Forwards run in the order of their batches: one may carry tokens of the one before. `end_tokens`: the
    model's own, which min_tokens forbids. `padding`: run the shapes that captured forwards would have; on a CPU that
    only shows that padding changes nothing. `chooses` False: another rank chooses the tokens; this one reports none.
    `context`: what is kept of the rows that want one; a model without a head has no logits to keep.
    """

    def __init__(
        self,
        model: ServedModel,
        backend: AttentionBackend[Any],
        end_tokens: Set[int] = frozenset(),
        padding: Padding | None = None,
        chooses: bool = True,
        context: ContextLayout = NO_CONTEXT,
    ) -> None:
        self._model = model
        self._backend = backend
        self._end_tokens = end_tokens
        self._padding = padding
        self._chooses = chooses
        self._context = context
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
        samples, contexts = self._run(work.inputs, work.plan)
        tokens = work.inputs.without_void(samples, previous)
        self._previous = tokens
        return ForwardResult(tokens, started, time.monotonic_ns(), contexts)

    def close(self) -> None:
        self._model.close()

    def _plan(self, batch: ForwardBatch) -> PlannedForward:
        return PlannedForward(prepare_forward(batch), self._backend.plan(batch))

    def _run(self, inputs: PreparedForward, plan: Any) -> tuple[Samples, Sequence[torch.Tensor]]:
        work = inputs.token_ids, inputs.positions, plan, inputs.outputs
        if not self._chooses:
            self._model.hidden(*work)
            return [], ()
        count = len(inputs.keys)
        context = self._context if len(inputs.contexts) else NO_CONTEXT
        hidden, logits = run_for(self._model, work, bool(count), context)
        samples = sample_tokens(logits[:count], inputs.keys, self._end_tokens) if logits is not None and count else []
        if not context.parts:
            return samples, ()
        kept = (None if rows is None else rows[count:] for rows in (hidden, logits))
        return samples, list(pack(context, *kept))
