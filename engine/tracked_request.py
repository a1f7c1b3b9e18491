"""A request of the offline face while it lives: what it has generated, and who hears of it."""

from engine.generation_output import GenerationOutput, GenerationRequest, Lifespan
from engine.output_sinks import OutputSink
from engine.outputs import Ended, NewToken
from engine.request import RequestStatus
from protocol.messages import FinishReason

_TERMINAL = {FinishReason.ERROR: RequestStatus.FAILED, FinishReason.CANCELLED: RequestStatus.CANCELLED}


class TrackedRequest:
    """One sequence. Keeps its own tokens, so that they outlast whatever the engine does with the request.

    Built by the submitting thread; from then on the engine's thread alone calls it, or whoever finds that thread ended.
    """

    def __init__(self, request_id: str, index: int, wanted: GenerationRequest, sink: OutputSink, now: float) -> None:
        self.id = request_id
        self._index = index
        self._prompt = tuple(wanted.prompt_ids)
        self._streaming = wanted.streaming
        self._sink = sink
        self._created = now
        self._started: float | None = None
        self._generated: list[int] = []
        self._logprobs: list[float] | None = [] if wanted.sampling.logprobs else None
        self._timestamps: list[float] | None = [] if wanted.record_timestamps else None

    def start(self, now: float) -> None:
        """It was scheduled. Later calls change nothing."""
        if self._started is None:
            self._started = now

    def add(self, new: NewToken, now: float, last: bool) -> None:
        """`last`: the terminal output of the same step will show this token."""
        assert new.index == len(self._generated), f"request {self.id!r}: token {new.index} came out of order"
        self.start(now)
        self._generated.append(new.token)
        if self._logprobs is not None:
            assert new.logprob is not None, f"request {self.id!r}: token {new.index} has no logprob"
            self._logprobs.append(new.logprob)
        if self._timestamps is not None:
            self._timestamps.append(now)
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
    ) -> GenerationOutput:
        return GenerationOutput(
            request_id=self.id,
            prompt_ids=self._prompt,
            generated_ids=tuple(self._generated),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            status=status,
            finish_reason=reason,
            error=error,
            created_time=self._created,
            lifespan=Lifespan(self._started, ended),
            timestamps=None if self._timestamps is None else tuple(self._timestamps),
            sequence_index=self._index,
        )
