"""One forward of what was scheduled: assembled, announced, launched, taken in. What follows from it is the engine's."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.cache_manager import CacheManager, Holding
from engine.errors import DeviceLost, ForwardFailed
from engine.forward_batch import PLACEHOLDER, BatchRow, ForwardBatch
from engine.outputs import EngineListener, PrefillChunk
from engine.progress import ProgressWord
from engine.runner import ForwardResult, PendingForward, Runner, SampledToken
from engine.scheduler import ScheduledRequest

log = logging.getLogger(__name__)

Outcome = SampledToken | str | None
"""Of one scheduled request: its token, what went wrong with it alone, or None where no token was wanted."""


@dataclass(frozen=True)
class InFlight:
    """A forward under way, and the requests it is of. `parked`: blocks that it still uses and that are free once it has
    ended."""

    scheduled: Sequence[ScheduledRequest]
    batch: ForwardBatch
    prompt_tokens: int
    chunks: Sequence[PrefillChunk]
    pending: PendingForward
    parked: list[Holding] = field(default_factory=list)


class ForwardPass:
    """Keeps the promise to the listener: announced, then ended or failed."""

    def __init__(self, runner: Runner, cache: CacheManager, progress: ProgressWord) -> None:
        self._runner = runner
        self._cache = cache
        self._progress = progress

    def launch(self, scheduled: Sequence[ScheduledRequest], listener: EngineListener | None) -> InFlight:
        """Advances each request's `computed`. Raises ForwardFailed, after the listener was told."""
        batch, prompt_tokens = self._assemble(scheduled)
        chunks = self._chunks(scheduled) if listener else []
        if listener and chunks:
            listener.before_forward(chunks)
        try:
            return InFlight(scheduled, batch, prompt_tokens, chunks, self._runner.launch(batch))
        except DeviceLost as error:
            self._failed(batch, chunks, error, listener)
            raise
        except Exception as error:
            raise self._failed(batch, chunks, error, listener) from error

    def finish(self, flight: InFlight, listener: EngineListener | None) -> tuple[ForwardResult, Sequence[Outcome]]:
        """Waits for it; one outcome per scheduled request, in order. Raises ForwardFailed, after the listener was
        told."""
        try:
            result = flight.pending.result()
        except DeviceLost as error:
            self._failed(flight.batch, flight.chunks, error, listener)
            raise
        except Exception as error:
            raise self._failed(flight.batch, flight.chunks, error, listener) from error
        self._keep_contexts(flight, result)
        if listener and flight.chunks:
            listener.forward_ended(flight.chunks, result.started_ns, result.ended_ns)
        return result, _outcomes(flight.batch, result.tokens)

    def announce_cached(self, scheduled: Sequence[ScheduledRequest], listener: EngineListener | None, now: int) -> None:
        """Prompts that were found in the cache as a whole: there is nothing to run, and all of their KV is there."""
        chunks = self._chunks(scheduled)
        if listener and chunks:
            listener.before_forward(chunks)
            listener.forward_ended(chunks, now, now)

    def _failed(
        self, batch: ForwardBatch, chunks: Sequence[PrefillChunk], error: Exception, listener: EngineListener | None
    ) -> ForwardFailed:
        lost = isinstance(error, DeviceLost)  # which, and how, is in the log already
        log.error("a forward of %d tokens failed", batch.num_tokens, exc_info=None if lost else error)
        reason = "the node lost a device" if lost else f"{type(error).__name__}: {error}"
        if listener and chunks:
            listener.forward_failed(chunks, reason)
        return ForwardFailed(reason)

    def _assemble(self, scheduled: Sequence[ScheduledRequest]) -> tuple[ForwardBatch, int]:
        """The batch, and how many of its tokens are of prompts."""
        rows, samples, prompt_tokens = [], 0, 0
        keeps_contexts = self._cache.contexts is not None
        for item in scheduled:
            request, start, end = item.request, item.start, item.start + item.length
            known, carry, sample = len(request.tokens), -1, None
            tokens = request.tokens[start:end] if end <= known else [PLACEHOLDER]
            if end > known:
                carry = request.sample_index
            if end == known + request.unknown and not request.prefill_only:
                sample = request.samples
                request.unknown += 1
                request.sample_index = samples
                samples += 1
            if sample is None or item.length > 1:
                prompt_tokens += item.length
            request.computed = end
            request.in_flight += 1
            context = self._place_of_context(item) if keeps_contexts else -1
            rows.append(BatchRow(request.id, start, tokens, request.tables, sample, carry, context))
        return ForwardBatch(rows), prompt_tokens

    def _place_of_context(self, item: ScheduledRequest) -> int:
        """See BatchRow.context."""
        position = item.request.context_position
        wanted = item.start <= position < item.end and self._cache.wants_context(item.request)
        return position - item.start if wanted else -1

    def _keep_contexts(self, flight: InFlight, result: ForwardResult) -> None:
        left = iter(result.contexts)
        for item, row in zip(flight.scheduled, flight.batch.rows, strict=True):
            if row.context >= 0:
                self._cache.keep_context(item.request, next(left))

    def _chunks(self, scheduled: Sequence[ScheduledRequest]) -> list[PrefillChunk]:
        """The word is read anew for each forward: one that failed has left it part of the way."""
        first = self._progress.value + 1
        return [
            PrefillChunk(
                request_id=item.request.id,
                start=item.start,
                end=item.end,
                tables=tuple(map(tuple, self._cache.tables(item.request.owner))),
                first_threshold=first,
                context_slot=self._cache.slot(item.request.owner),
            )
            for item in scheduled
            if item.request.prefill_only
        ]


def _outcomes(batch: ForwardBatch, tokens: Sequence[SampledToken | str]) -> Sequence[Outcome]:
    if len(tokens) == len(batch.rows):
        return tokens
    left = iter(tokens)
    return [next(left) if row.sample is not None else None for row in batch.rows]
