"""A listener that records what it is told of prefill chunks."""

from collections.abc import Sequence

from engine.outputs import PrefillChunk
from tests.engine.traces import Harness


class RecordingListener:
    """Keeps what it is told, and the progress word at that moment."""

    def __init__(self, harness: Harness) -> None:
        self._word = harness.engine.progress
        self.calls: list[str] = []
        self.announced: list[Sequence[PrefillChunk]] = []
        self.words: list[int] = []

    def before_forward(self, chunks: Sequence[PrefillChunk]) -> None:
        self.calls.append("before")
        self.announced.append(chunks)
        self.words.append(self._word.value)

    def forward_ended(self, chunks: Sequence[PrefillChunk], started_ns: int, ended_ns: int) -> None:
        assert chunks == self.announced[-1]
        assert 0 < started_ns <= ended_ns
        self.calls.append("ended")
        self.words.append(self._word.value)

    def forward_failed(self, chunks: Sequence[PrefillChunk], error: str) -> None:
        assert chunks == self.announced[-1]
        self.calls.append(f"failed {error}")
        self.words.append(self._word.value)


def listening(harness: Harness) -> RecordingListener:
    harness.engine.listener = RecordingListener(harness)
    return harness.engine.listener
