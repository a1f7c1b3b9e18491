"""The requests of the offline face that have no terminal output yet."""

import threading
from collections.abc import Callable

from engine.errors import InvalidRequest
from engine.generation_output import GenerationRequest
from engine.output_sinks import OutputSink
from engine.outputs import StepOutput
from engine.request import Request
from engine.tracked_request import TrackedRequest


class LiveRequests:
    """Turns what the engine reports into outputs. A request leaves just before its one terminal output is delivered:
    whoever holds that output may use its id again.

    Methods are for the engine's thread, except where they say otherwise. `clock`: in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._tracked: dict[str, TrackedRequest] = {}

    def __len__(self) -> int:
        return len(self._tracked)

    def __contains__(self, request_id: str) -> bool:
        """Any thread."""
        return request_id in self._tracked

    def add(self, request: Request, wanted: GenerationRequest, sink: OutputSink) -> None:
        """It and the sequences that will be forked off it. Any thread. Raises InvalidRequest if an id is taken."""
        now = self._clock()
        names = sequence_ids(request)
        with self._changed:
            for place, name in enumerate(names, 1):
                if name in self._tracked or not sink.open(name):
                    self._close(names[: names.index(name)], sink)
                    raise InvalidRequest(f"request {name!r} is running already, or its terminal output was not taken")
                self._tracked[name] = TrackedRequest(name, place % len(names), wanted, sink, now)

    def withdraw(self, request: Request, sink: OutputSink) -> None:
        """Undo `add`, where the engine's thread will never hear of it. Any thread."""
        with self._changed:
            self._close(sequence_ids(request), sink)

    def on_step(self, output: StepOutput) -> None:
        now = self._clock()
        for name in output.started:
            if name in self._tracked:
                self._tracked[name].start(now)
        lengths = {end.request_id: end.generated for end in output.ended}
        for new in output.tokens:
            tracked = self._tracked.get(new.request_id)
            if tracked is not None:
                tracked.add(new, now, last=lengths.get(new.request_id) == new.index + 1)
        for end in output.ended:
            tracked = self._leave(end.request_id)
            if tracked is not None:
                tracked.end(end, now)

    def fail(self, request: Request, error: str) -> None:
        """The engine did not take it."""
        for name in sequence_ids(request):
            tracked = self._leave(name)
            if tracked is not None:
                tracked.fail(error, self._clock())

    def fail_all(self, error: str) -> list[str]:
        """Their ids. Any thread, once the engine's has ended."""
        with self._changed:
            rest, self._tracked = self._tracked, {}
            self._changed.notify_all()
        for tracked in rest.values():
            tracked.fail(error, self._clock())
        return list(rest)

    def wait_none(self, timeout_s: float | None) -> bool:
        """Whether there are none, within the time. Any thread."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tracked, timeout_s)

    def _close(self, names: list[str], sink: OutputSink) -> None:
        for name in names:
            del self._tracked[name]
            sink.close(name)

    def _leave(self, request_id: str) -> TrackedRequest | None:
        with self._changed:
            tracked = self._tracked.pop(request_id, None)
            if not self._tracked:
                self._changed.notify_all()
        return tracked


def sequence_ids(request: Request) -> list[str]:
    """Of the sequences forked off it, then its own."""
    return [*request.child_ids(), request.id]
