"""Runs forwards on a device with queues of its own: launched, not waited for, captured and replayed where that pays.

One forward:   upload    inputs and the attention's plan, into one of the IO pairs
               compute   tokens carried from the forward before, the model, the choice of tokens
               download  the samples' report

With two pairs a forward is uploaded while the one before computes; with one, `launch` waits for its own. The progress
word's `advance` is called while the model's launches are enqueued, or recorded into a graph, not when they run: it is a
word that the device itself advances, in the order of the current stream (see device_progress).
"""

import time
from collections.abc import Sequence, Set
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.contexts import pack
from engine.device_batch import IOPair, Shape
from engine.forward_batch import ForwardBatch
from engine.futures import settled
from engine.graph_cache import Capture, GraphCache
from engine.models.base import run_for
from engine.models.binding import BoundModel
from engine.padding import GraphKey, Padding, is_decode
from engine.prepared_forward import PreparedForward, Samples, prepare_forward
from engine.runner import ForwardResult, Runner
from engine.sampler import plan_samples, read_report
from engine.streams import Mark, Streams
from protocol.context import NO_CONTEXT, ContextLayout


class Planner(Protocol):
    """A backend's plans over one set of buffers: a plan is valid until the next one is asked for."""

    def plan(self, batch: ForwardBatch, key: GraphKey | None) -> Any:
        """With a `key`, all plans of equal keys work on the same memory in the same way, so that a forward captured
        with one of them can be replayed after another one."""


@dataclass(frozen=True)
class Graphs:
    """`varlen` and `decode`: which batches are captured; the others run as they are, unpadded."""

    padding: Padding
    capture: Capture
    varlen: bool = True
    decode: bool = True


@dataclass(frozen=True)
class DeviceSizes:
    """`dtype`: of the logits. `max_samples`: the request cap."""

    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_tokens: int
    max_samples: int


@dataclass(frozen=True)
class _Launched:
    """`report` is on the host when `done` is reached. `contexts`: on the device, of the rows that want one."""

    inputs: PreparedForward
    report: torch.Tensor
    contexts: torch.Tensor | None
    done: Mark
    started_ns: int


class DeviceForward:
    """A forward under way, or one that could not be launched. `before`: the one whose tokens it may carry. Times are as
    the host saw them: from the launch to when it was known to have ended."""

    def __init__(self, launched: "Future[_Launched]", before: "DeviceForward | None") -> None:
        self._launched = launched
        self._before = before
        self._result: Future[ForwardResult] | None = None

    def result(self) -> ForwardResult:
        return self.settle().result()

    def settle(self) -> "Future[ForwardResult]":
        """Waits until it has ended, well or not. Its pair may then be written again."""
        if self._result is None:
            self._result = settled(self._read)
            self._before = None
        return self._result

    def samples(self) -> Samples | None:
        """None if it failed."""
        result = self.settle()
        return None if result.exception() else result.result().tokens

    def _read(self) -> ForwardResult:
        launched = self._launched.result()
        launched.done.synchronize()
        ended = time.monotonic_ns()
        tokens = read_report(launched.report)
        if launched.inputs.carries:
            tokens = launched.inputs.without_void(tokens, self._before.samples() if self._before else None)
        contexts = () if launched.contexts is None else list(launched.contexts.cpu())
        return ForwardResult(tokens, launched.started_ns, ended, contexts)


class _Side:
    """One of the pairs, with what belongs to it."""

    def __init__(self, planner: Planner, sizes: DeviceSizes, capture: Capture | None) -> None:
        self.pair = IOPair(sizes.max_tokens, sizes.max_samples, sizes.device)
        self.planner = planner
        self.graphs = GraphCache(capture) if capture else None
        self.forward: DeviceForward | None = None
        self.plan: Any = None
        """Kept while the device may read it: memory of a stream is used again as soon as nobody holds it."""


class DeviceRunner(Runner):
    """`planners`: one for each pair; two make it asynchronous. `end_tokens`: the model's own. `resources`: what the
    forwards work on, closed behind the last of them. `context`: see ModelRunner.

    What the caller's own stream was given before `launch` comes before the forward, and what it is given afterwards
    behind it: blocks may be copied between two launches without waiting for anything.
    """

    def __init__(
        self,
        model: BoundModel,
        planners: Sequence[Planner],
        streams: Streams,
        sizes: DeviceSizes,
        graphs: Graphs | None = None,
        end_tokens: Set[int] = frozenset(),
        resources: ExitStack | None = None,
        context: ContextLayout = NO_CONTEXT,
    ) -> None:
        self._resources = resources or ExitStack()
        self._model = model
        self._streams = streams
        self._sizes = sizes
        self._graphs = graphs
        self._end_tokens = end_tokens
        self._context = context
        self._sides = [_Side(planner, sizes, graphs.capture if graphs else None) for planner in planners]
        self._logits = torch.zeros(sizes.max_samples, sizes.vocab_size, dtype=sizes.dtype, device=sizes.device)
        self._turn = 0

    @property
    def graph_caches(self) -> list[GraphCache]:
        """One for each pair, if forwards are captured."""
        return [side.graphs for side in self._sides if side.graphs]

    def launch(self, batch: ForwardBatch) -> DeviceForward:
        side, before = self._sides[self._turn], self._sides[self._turn - 1]
        self._turn = (self._turn + 1) % len(self._sides)
        carried_from = before.forward
        if side.forward:
            side.forward.settle()
        side.forward = DeviceForward(settled(self._start, side, before.pair, carried_from, batch), carried_from)
        if len(self._sides) == 1:
            side.forward.settle()
        return side.forward

    def close(self) -> None:
        """Waits for what is under way."""
        with self._resources:
            for side in self._sides:
                if side.forward:
                    side.forward.settle()

    @torch.inference_mode()
    def _start(self, side: _Side, before: IOPair, carried_from: DeviceForward | None, batch: ForwardBatch) -> _Launched:
        started, asked = time.monotonic_ns(), self._streams.mark()
        wanted = batch.num_samples
        batch, key = self._padded(batch)
        inputs = prepare_forward(batch)
        shape = Shape(batch.num_tokens, key.samples if key else wanted, wanted)
        if inputs.carries_history:
            inputs.fill(carried_from.samples() if carried_from else None)
        with self._streams.upload():
            side.pair.upload(inputs, shape)
            side.plan = side.planner.plan(batch, key)
            uploaded = self._streams.mark()
        with self._streams.compute():
            asked.wait()
            uploaded.wait()
            if inputs.carries and not inputs.carries_history:
                side.pair.fill_carried(before, shape.tokens)
            contexts = self._run_with_contexts(side, shape, inputs) if batch.has_contexts else None
            if contexts is None:
                self._run(side, shape, key)
            self._choose(side.pair, inputs)
            computed = self._streams.mark()
        computed.wait()
        with self._streams.download():
            computed.wait()
            return _Launched(inputs, side.pair.download(wanted), contexts, self._streams.mark(), started)

    def _padded(self, batch: ForwardBatch) -> tuple[ForwardBatch, GraphKey | None]:
        """No key: it is run as it is, as every one that contexts are kept of is."""
        graphs = self._graphs
        if graphs and not batch.has_contexts and (graphs.decode if is_decode(batch) else graphs.varlen):
            return graphs.padding.pad(batch)
        return batch, None

    def _run(self, side: _Side, shape: Shape, key: GraphKey | None) -> None:
        """Leaves the logits in their buffer."""
        plan = side.plan
        token_ids, positions = side.pair.token_ids.device[: shape.tokens], side.pair.positions.device[: shape.tokens]
        ends = side.pair.ends.device[: shape.samples]

        def forward() -> None:
            if shape.samples:
                self._logits[: shape.samples] = self._model.logits(token_ids, positions, plan, ends)
            else:
                self._model.hidden(token_ids, positions, plan, ends)

        if key and side.graphs:
            side.graphs.run(key, forward)
        else:
            forward()

    def _run_with_contexts(self, side: _Side, shape: Shape, inputs: PreparedForward) -> torch.Tensor:
        """Leaves the logits of the samples in their buffer; the contexts are returned."""
        token_ids, positions = side.pair.token_ids.device[: shape.tokens], side.pair.positions.device[: shape.tokens]
        work = token_ids, positions, side.plan, inputs.outputs.to(self._sizes.device)
        hidden, logits = run_for(self._model, work, bool(shape.samples), self._context)
        if logits is not None:
            self._logits[: shape.samples] = logits[: shape.samples]
        return pack(self._context, *(None if rows is None else rows[shape.samples :] for rows in (hidden, logits)))

    def _choose(self, pair: IOPair, inputs: PreparedForward) -> None:
        """The host prepares the choice while the device computes."""
        if inputs.keys:
            plan = plan_samples(inputs.keys, self._end_tokens, self._sizes.vocab_size, self._sizes.device)
            samples = plan.choose(self._logits[: len(inputs.keys)])
            pair.keep(samples.tokens, samples.report)
