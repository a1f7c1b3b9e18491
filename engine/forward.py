"""One forward of what was scheduled: assembled, announced, run. What follows from it is the engine's matter."""

import logging
import time
from collections.abc import Sequence

from engine.allocators import FullAttentionCacheAllocator
from engine.errors import ForwardFailed
from engine.forward_batch import BatchRow, ForwardBatch, SampleKey
from engine.model_runner import Runner
from engine.outputs import EngineListener, PrefillChunk
from engine.progress import ProgressWord
from engine.scheduler import ScheduledRequest

log = logging.getLogger(__name__)

Sampled = dict[str, int | None]
"""New token by request id, of those that got one; None where the model's output was not finite."""


class ForwardPass:
    """Runs forwards one after the other, and keeps the promise to the listener: announced, then ended or failed."""

    def __init__(self, runner: Runner, allocator: FullAttentionCacheAllocator, progress: ProgressWord) -> None:
        self._runner = runner
        self._allocator = allocator
        self._progress = progress

    def run(self, scheduled: Sequence[ScheduledRequest], listener: EngineListener | None) -> Sampled:
        """Advances each request's `computed`. Raises ForwardFailed, after the listener was told."""
        batch = self._assemble(scheduled)
        chunks = self._chunks(scheduled) if listener else []
        if listener and chunks:
            listener.before_forward(chunks)
        started = time.monotonic_ns()
        try:
            tokens = self._runner.run(batch)
        except Exception as error:
            log.exception("a forward of %d tokens failed", batch.num_tokens)
            reason = f"{type(error).__name__}: {error}"
            if listener and chunks:
                listener.forward_failed(chunks, reason)
            raise ForwardFailed(reason) from error
        if listener and chunks:
            listener.forward_ended(chunks, started, time.monotonic_ns())
        return dict(zip((row.request_id for row in batch.rows if row.sample), tokens, strict=True))

    def _assemble(self, scheduled: Sequence[ScheduledRequest]) -> ForwardBatch:
        rows = []
        for item in scheduled:
            request = item.request
            request.computed = item.end
            key = None
            if request.remaining == 0 and not request.prefill_only:
                key = SampleKey(request.sampling, request.seed, item.end, request.tokens, len(request.prompt))
            tokens = request.tokens[item.start : item.end]
            rows.append(BatchRow(request.id, item.start, tokens, [self._allocator.blocks(request.owner)], key))
        return ForwardBatch(rows)

    def _chunks(self, scheduled: Sequence[ScheduledRequest]) -> list[PrefillChunk]:
        """The word is read anew for each forward: one that failed has left it part of the way."""
        first = self._progress.value + 1
        return [
            PrefillChunk(
                request_id=item.request.id,
                start=item.start,
                end=item.end,
                total=len(item.request.tokens),
                blocks=tuple(self._allocator.blocks(item.request.owner)),
                first_threshold=first,
            )
            for item in scheduled
            if item.request.prefill_only
        ]
