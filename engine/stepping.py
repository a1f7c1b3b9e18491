"""What one step does, part by part: schedule, launch, and take in what a forward has given."""

import time
from collections.abc import Sequence

from engine.counters import EngineCounters
from engine.errors import ForwardFailed
from engine.forking import Forking
from engine.forward import ForwardPass, InFlight, Outcome
from engine.lives import Lives
from engine.outputs import EngineListener, NewToken
from engine.request import Request, RequestStatus
from engine.room import RoomMaker
from engine.runner import SampledToken
from engine.scheduler import ScheduledRequest, Scheduler, SchedulerOutput
from protocol.messages import FailureCode, FinishReason

FINISHED = RequestStatus.FINISHED


class Stepping:
    """The parts of a step, in the order of its methods. `listener` may be set until the first."""

    def __init__(
        self,
        lives: Lives,
        scheduler: Scheduler,
        room: RoomMaker,
        forking: Forking,
        forward_pass: ForwardPass,
        counters: EngineCounters,
        page_size: int,
    ) -> None:
        self.listener: EngineListener | None = None
        self._lives = lives
        self._scheduler = scheduler
        self._room = room
        self._forking = forking
        self._forward_pass = forward_pass
        self._counters = counters
        self._page_size = page_size

    def schedule(self) -> Sequence[ScheduledRequest]:
        """Make room until something can run, then for those that stalled beside it."""
        began = time.monotonic_ns()
        output = self._scheduler.schedule()
        while output.cache_full and self._make_room(output):
            output = self._scheduler.schedule()
        if output.scheduled and output.stalled:
            self._make_room(output)
        self._room.restore(output)
        for request in output.restored:
            self._lives.register(request, 0, request.computed)
        self._counters.schedule_ns += time.monotonic_ns() - began
        return output.scheduled

    def launch(self, scheduled: Sequence[ScheduledRequest]) -> InFlight | None:
        """None if there was nothing to run, or if it failed at once, and its requests with it."""
        began = time.monotonic_ns()
        cached = [item for item in scheduled if not item.length]
        if cached:
            self._forward_pass.announce_cached(cached, self.listener, began)
            scheduled = [item for item in scheduled if item.length]
        for item in cached:
            self._lives.prefilled(item.request)
        try:
            return self._forward_pass.launch(scheduled, self.listener) if scheduled else None
        except ForwardFailed as error:
            self._fail_batch(scheduled, error)
            return None
        finally:
            self._counters.launch_ns += time.monotonic_ns() - began

    def take_in(self, flight: InFlight) -> None:
        """Waits for the forward, then brings its requests up to date."""
        began = time.monotonic_ns()
        try:
            result, outcomes = self._forward_pass.finish(flight, self.listener)
        except ForwardFailed as error:
            self._lives.unpark(flight)
            self._fail_batch(flight.scheduled, error)
            return
        ended = time.monotonic_ns()
        self._lives.unpark(flight)
        for item, outcome in zip(flight.scheduled, outcomes, strict=True):
            self._update(item, outcome)
        counters = self._counters
        counters.batches += 1
        counters.tokens += len(self._lives.output.tokens)
        counters.prompt_tokens += flight.prompt_tokens
        counters.forward_ns += ended - began
        counters.device_ns += result.ended_ns - result.started_ns
        counters.update_ns += time.monotonic_ns() - ended

    def _make_room(self, output: SchedulerOutput) -> bool:
        """False if nothing can be done now: they wait for a forward under way, or for pages of others."""
        outgrown = [request for request in self._room.outgrown(output.stalled) if not request.in_flight]
        for request in outgrown:
            self._lives.fail(request, FailureCode.CAPACITY, f"it outgrew the cache at {len(request.tokens)} tokens")
        return bool(outgrown) or self._room.make_room(output)

    def _update(self, item: ScheduledRequest, outcome: Outcome) -> None:
        request = item.request
        request.in_flight -= 1
        if outcome is not None:
            request.unknown -= 1
        if request.status >= FINISHED:
            return
        if isinstance(outcome, str):
            # What made its logits wrong may be in its KV: nobody else is to begin with it.
            self._lives.fail(request, FailureCode.INTERNAL, outcome, keep=False)
            return
        end = item.start + item.length
        if end % self._page_size < item.length:  # a page ends among them
            self._lives.register(request, item.start, end)
        if outcome is None:
            self._prompt_advanced(request)
        else:
            self._append(request, outcome)

    def _append(self, request: Request, sampled: SampledToken) -> None:
        token, logprob = sampled
        tokens = request.tokens
        self._lives.output.tokens.append(NewToken(request.id, len(tokens) - len(request.prompt), token, logprob))
        tokens.append(token)
        if token in request.end_tokens:
            self._lives.end(request, FINISHED, FinishReason.STOP)
        elif len(tokens) >= request.token_limit:
            self._lives.end(request, FINISHED, FinishReason.LENGTH)

    def _prompt_advanced(self, request: Request) -> None:
        if request.prefill_only and request.remaining == 0:
            self._lives.prefilled(request)
        elif request.unborn and request.remaining == 1 and not request.in_flight:
            self._forking.fork(request)

    def _fail_batch(self, scheduled: Sequence[ScheduledRequest], error: ForwardFailed) -> None:
        self._counters.failed_batches += 1
        for request in (item.request for item in scheduled):
            request.in_flight -= 1
            if not request.is_terminal:
                self._lives.fail(request, FailureCode.INTERNAL, str(error))
