"""Runners of engines whose ranks are, all or all but the first, workers. See engine/runner.py for the contract.

Ranks are in step, or of no use: whatever a rank raises in a forward is the end of the engine (DeviceLost), where a
single device would fail one batch.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillUnderWay
from dataclasses import dataclass

from engine.collective import GlooCollective
from engine.errors import CollectiveBroken, DeviceLost
from engine.forward_batch import ForwardBatch
from engine.futures import settled
from engine.model_runner import ModelRunner
from engine.progress import ProgressWord
from engine.runner import ForwardResult, PendingForward, Runner
from engine.workers.group import WorkerGroup
from engine.workers.messages import as_forward

SILENCE_S = 30.0
"""No layer takes longer, on any rank: one that was not heard of for so long hangs."""
_LOOK_S = 0.5


class LocalMainRunner(Runner):
    """The main rank runs here, in the caller's thread; the workers are the others. Synchronous."""

    def __init__(self, group: WorkerGroup, main: ModelRunner, collective: GlooCollective) -> None:
        self._group = group
        self._main = main
        self._collective = collective

    def launch(self, batch: ForwardBatch) -> "Future[ForwardResult]":
        """Raises DeviceLost."""
        self._group.tell(as_forward(batch, chosen=False))
        forward = self._main.launch(batch)
        error = forward.exception()
        if isinstance(error, CollectiveBroken):
            raise self._group.why_lost(error) from error
        if error:
            raise self._group.lose(f"rank 0 failed: {type(error).__name__}: {error}") from error
        return forward

    def close(self) -> None:
        self._group.close()
        self._collective.close()
        self._main.close()

    def when_lost(self, call: Callable[[DeviceLost], None]) -> None:
        self._group.when_lost(call)


class RemoteMainRunner(Runner):
    """All ranks are workers; the main one's samples come back. `progress`: its word."""

    def __init__(
        self, group: WorkerGroup, progress: ProgressWord, asynchronous: bool, silence_s: float = SILENCE_S
    ) -> None:
        self._group = group
        self._progress = progress
        self._asynchronous = asynchronous
        self._silence_s = silence_s

    def launch(self, batch: ForwardBatch) -> PendingForward:
        """Raises DeviceLost."""
        answer = self._group.forward(as_forward(batch, chosen=True))
        pending = _RemoteForward(answer, self._group, self._progress, self._silence_s)
        return pending if self._asynchronous else settled(pending.result)

    def close(self) -> None:
        self._group.close()

    def when_lost(self, call: Callable[[DeviceLost], None]) -> None:
        self._group.when_lost(call)


@dataclass(frozen=True)
class _RemoteForward:
    answer: "Future[ForwardResult]"
    group: WorkerGroup
    progress: ProgressWord
    silence_s: float

    def result(self) -> ForwardResult:
        """Raises DeviceLost, also where the word has stood still for too long."""
        word, since = self.progress.value, time.monotonic()
        while True:
            try:
                return self.answer.result(min(_LOOK_S, self.silence_s))
            except StillUnderWay:
                now = time.monotonic()
                if self.progress.value != word:
                    word, since = self.progress.value, now
                elif now - since > self.silence_s:
                    raise self.group.lose(f"rank 0 was not heard of for {self.silence_s:g} s: it hangs") from None
