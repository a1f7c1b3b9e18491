"""A request of the offline face while it lives: what it has generated, and who hears of it."""

from engine.generation_output import GenerationRequest, Lifespan
from engine.output_sinks import OutputSink
from engine.outputs import Ended, NewToken
from engine.request import RequestStatus
from engine.snapshot import Generated, Snapshot
from protocol.messages import FinishReason

_TERMINAL = {FinishReason.ERROR: RequestStatus.FAILED, FinishReason.CANCELLED: RequestStatus.CANCELLED}


class TrackedRequest:
    """One sequence. Keeps its own tokens, so that they outlast whatever the engine does with the request.

    Built by the submitting thread; from then on the engine's thread alone calls it, or whoever finds that thread ended.
    """

    def __init__(self, request_id: str, index: int, wanted: GenerationRequest, sink: OutputSink, now: float) -> None:
        self._streaming = wanted.streaming
        self._sink = sink
        self._started: float | None = None
        self._generated = Generated(
            request_id,
            index,
            tuple(wanted.prompt_ids),
            created=now,
            logprobs=[] if wanted.sampling.logprobs else None,
            timestamps=[] if wanted.record_timestamps else None,
        )

    def start(self, now: float) -> None:
        """It was scheduled. Later calls change nothing."""
        if self._started is None:
            self._started = now

    def add(self, new: NewToken, now: float, last: bool) -> None:
        """`last`: the terminal output of the same step will show this token."""
        its = self._generated
        assert new.index == len(its.tokens), f"request {its.request_id!r}: token {new.index} came out of order"
        self.start(now)
        its.tokens.append(new.token)
        if its.logprobs is not None:
            assert new.logprob is not None, f"request {its.request_id!r}: token {new.index} has no logprob"
            its.logprobs.append(new.logprob)
        if its.timestamps is not None:
            its.timestamps.append(now)
        if self._streaming and not last:
            self._sink.put(self._snapshot(RequestStatus.DECODING, None, None, None))

    def end(self, ended: Ended, now: float) -> None:
        status = _TERMINAL.get(ended.reason, RequestStatus.FINISHED)
        error = ended.failure.message if ended.failure else None
        self._sink.put(self._snapshot(status, ended.reason, error, now))

    def fail(self, error: str, now: float) -> None:
        """The engine will say nothing more about it."""
        self._sink.put(self._snapshot(RequestStatus.FAILED, FinishReason.ERROR, error, now))

    def _snapshot(
        self, status: RequestStatus, reason: FinishReason | None, error: str | None, ended: float | None
    ) -> Snapshot:
        its = self._generated
        return Snapshot(its, len(its.tokens), status, reason, error, Lifespan(self._started, ended))
