"""The engine's face for people who use it alone: requests from any thread, outputs to any thread.

Life of a request. `submit` checks it, remembers it among the live ones and posts it to the engine's thread, which adds
it to the engine. Each step's tokens and ends become snapshots, delivered to the request's own queue or to a callback on
an asyncio loop. Whatever ends the engine's thread, every request that is alive then gets its terminal output.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from enum import Enum
from types import TracebackType
from typing import Self

from engine.engine import Engine
from engine.errors import (
    CapacityExceeded,
    InvalidRequest,
    LoopNotStarted,
    LoopPaused,
    LoopStopped,
    QueueFull,
    RequestRefused,
)
from engine.generation_output import GenerationOutput, GenerationRequest
from engine.live_requests import LiveRequests, sequence_ids
from engine.loop import EngineLoop
from engine.output_queues import OutputQueues
from engine.output_sinks import EventLoopSink, OutputSink
from engine.outputs import StepOutput
from engine.request import Request
from engine.sampling_limits import sampling_refusal
from protocol.sampling import SamplingParams

QUEUE_S = 10.0
"""How long a submission waits for room in the bounded queue."""


class StopMode(Enum):
    SOFT = "soft"
    """Finish everything that was submitted."""
    HARD = "hard"
    """Fail everything that is not finished."""


class ContinuousBatchingManager:
    """Has the engine to itself from `start` to `stop`, which `with` calls; after that, another manager may have it. All
    methods are for any thread but the engine's. `clock`: seconds, for the times in outputs.

    The engine's `max_queue_size` bounds the requests that wait for the engine's thread to take them in.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._loop = EngineLoop(engine, self._on_step, self._on_end)
        self._outputs = OutputQueues()
        self._live = LiveRequests(clock)
        self._ids = itertools.count()
        self._changed = threading.Condition()
        self._queued = 0
        self._started = False
        self._accepting = True

    # ---- its life ----

    @property
    def alive(self) -> bool:
        return self._loop.alive

    @property
    def error(self) -> BaseException | None:
        """What ended the engine's thread, where nobody told it to."""
        return self._loop.error

    def start(self) -> None:
        """What was submitted before begins to run. Does nothing if it runs already; raises LoopStopped if it has been
        stopped, or has ended, or if the engine was left with work by another manager's death."""
        with self._changed:
            if not self._accepting:
                raise LoopStopped("a stopped manager cannot be started again: build a new one")
            if not self._started:
                if self._engine.has_work:
                    raise LoopStopped("the engine still has work of a manager whose thread died: build a new engine")
                self._loop.start()
                self._started = True

    def stop(self, mode: StopMode = StopMode.SOFT, timeout_s: float | None = None) -> None:
        """Accept nothing new, finish or fail what there is, then end the thread. May be called again, and harder.

        `timeout_s`: how long finishing may take. Raises TimeoutError after it, with the rest still running, and
        LoopPaused inside a pause of the caller's own.
        """
        if self._loop.paused_by_caller:
            raise LoopPaused("stopping would wait for the caller's own pause: leave it first")
        self._accept_nothing()
        if mode is StopMode.SOFT and self.alive and not self._live.wait_none(timeout_s):
            raise TimeoutError(f"{len(self._live)} requests have not finished within {timeout_s} s")
        with suppress(LoopStopped):
            self._loop.post(self._empty)
        self._loop.stop()
        self._live.fail_all(self._why_ended())

    def pause(self) -> AbstractContextManager[None]:
        """For `with manager.pause():`, inside which no step runs; the call alone pauses nothing. Several may hold it,
        the last one out lets it go on. See EngineLoop.pause."""
        return self._loop.pause()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finishes what was submitted; after an exception, fails it."""
        self.stop(StopMode.SOFT if kind is None else StopMode.HARD)

    # ---- requests ----

    def submit(
        self,
        wanted: GenerationRequest,
        on_output: Callable[[GenerationOutput], None] | None = None,
        timeout_s: float | None = QUEUE_S,
    ) -> str:
        """Its id. Without `on_output`, outputs wait for `get_result`, `stream` or `results`; with it, call this on an
        asyncio loop, which then calls `on_output` with each. What is submitted before `start` waits for that.

        Raises InvalidRequest; QueueFull if there is no room within `timeout_s`; LoopStopped when nothing new is
        accepted. A prompt that can never fit is accepted, and fails.
        """
        request = wanted.as_request(self._new_id() if wanted.request_id is None else wanted.request_id)
        with suppress(CapacityExceeded):
            self._engine.limits.validate(request)
        sink = EventLoopSink.here(on_output) if on_output else self._outputs
        self._submit(request, wanted, sink, timeout_s)
        return request.id

    def cancel(self, request_id: str) -> None:
        """Takes effect before the next step, in whatever state it is; its terminal output is CANCELLED, with the tokens
        so far. Unknown ids are ignored."""
        with suppress(LoopStopped):
            self._loop.post(lambda engine: engine.abort(request_id))

    def get_result(self, request_id: str | None = None, timeout_s: float | None = None) -> GenerationOutput | None:
        """The next output of that request, or of any; None if none comes in time, or (of any) none can come any more.
        Raises UnknownRequest for an id whose terminal output was taken, or that has a callback, and LoopNotStarted
        where it would wait before `start`."""
        self._check_started()
        if request_id is None:
            return self._outputs.take_any(timeout_s)
        return self._outputs.take(request_id, timeout_s)

    def stream(self, request_id: str) -> Iterator[GenerationOutput]:
        """The outputs of that request, up to its terminal one. Raises as `get_result` does."""
        self._check_started()
        return self._outputs.stream(request_id)

    def results(self) -> Iterator[GenerationOutput]:
        """The outputs of all requests as they come, but for those with callbacks and those that somebody else takes.
        Ends once all that was submitted has ended. Raises LoopNotStarted as `get_result` does."""
        self._check_started()
        while (output := self._outputs.take_any()) is not None:
            yield output

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, n: int = 1
    ) -> dict[str, GenerationOutput]:
        """Terminal outputs by id, in the order of `prompts`, a prompt's further sequences before its own.

        A prompt that is refused has a FAILED output, whose `error` says why, and costs the others nothing. Raises
        InvalidRequest for the sampling, LoopNotStarted before `start`, and LoopStopped when nothing new is accepted.
        When interrupted, it cancels what it submitted.
        """
        self._check_started()
        if refusal := sampling_refusal(sampling, self._engine.limits.vocab_size):
            raise InvalidRequest(f"sampling: {refusal}")
        wanted = [GenerationRequest(prompt_ids=list(prompt), sampling=sampling, n=n) for prompt in prompts]
        requests = [one.as_request(self._new_id()) for one in wanted]
        open_ids = [name for request in requests for name in sequence_ids(request)]
        outputs, results = OutputQueues(), dict[str, GenerationOutput]()
        try:
            for index in self._submission_order(prompts):
                self._submit(requests[index], wanted[index], outputs, timeout_s=None)
            for name in open_ids:
                output = outputs.take(name)
                assert output is not None, "waited without a time-out"
                results[name] = output
        finally:
            for name in open_ids[len(results) :]:
                self.cancel(name)
        return results

    # ---- any thread ----

    def _check_started(self) -> None:
        """Once it is stopped, nobody waits for ever."""
        if self._accepting and not self._started:
            raise LoopNotStarted("nothing runs yet: use `with manager:`, or call manager.start() first")

    def _new_id(self) -> str:
        names = (f"req_{number}" for number in self._ids)
        return next(name for name in names if name not in self._live and name not in self._outputs)

    def _submission_order(self, prompts: Sequence[Sequence[int]]) -> Sequence[int]:
        """Where blocks can be shared, prompts that begin alike follow each other."""
        order = range(len(prompts))
        if self._engine.prefix is None:
            return order
        try:
            return sorted(order, key=lambda index: list(prompts[index]), reverse=True)
        except TypeError:
            return order  # one of them is no list of tokens, and is refused by itself

    def _submit(self, request: Request, wanted: GenerationRequest, sink: OutputSink, timeout_s: float | None) -> None:
        """All in one, so that whatever ends the loop comes before it or after it."""
        with self._changed:
            self._wait_for_room(timeout_s)
            self._live.add(request, wanted, sink)
            try:
                self._loop.post(lambda engine: self._take_in(engine, request))
            except LoopStopped:
                self._live.withdraw(request, sink)
                raise
            self._queued += 1

    def _wait_for_room(self, timeout_s: float | None) -> None:
        most = self._engine.config.max_queue_size
        has_room = self._changed.wait_for(lambda: not self._accepting or not most or self._queued < most, timeout_s)
        if not self._accepting:
            raise LoopStopped(f"no new requests are accepted: {self._why_ended()}")
        if not has_room:
            raise QueueFull(f"{self._queued} requests still waited to be taken in after {timeout_s} s")

    def _accept_nothing(self) -> None:
        with self._changed:
            self._accepting = False
            self._changed.notify_all()

    def _why_ended(self) -> str:
        error = self._loop.error
        return f"the engine's thread ended: {type(error).__name__}: {error}" if error else "the engine was stopped"

    # ---- the engine's thread ----

    def _take_in(self, engine: Engine, request: Request) -> None:
        with self._changed:
            self._queued -= 1
            self._changed.notify_all()
        try:
            engine.add(request)
        except RequestRefused as error:
            self._live.fail(request, str(error))

    def _on_step(self, output: StepOutput) -> None:
        self._live.on_step(output)

    def _on_end(self) -> None:
        self._accept_nothing()
        self._live.fail_all(self._why_ended())

    def _empty(self, engine: Engine) -> None:
        """Fail what is left, and run until the engine has nothing to report and no forward under way."""
        for request_id in self._live.fail_all(self._why_ended()):
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
