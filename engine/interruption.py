"""Ctrl-C and SIGTERM, which mean the same here."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """While it is watched for, a signal raises KeyboardInterrupt on the main thread; while it is `postponed`, the first
    one only asks to stop."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self._postponed = False

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """As a shell gives it for a process that such a signal ended: 130 or 143."""
        assert self._signal is not None, "nothing interrupted"
        return 128 + self._signal

    @contextmanager
    def watched(self) -> Iterator[None]:
        """On the main thread."""
        before = {number: signal.signal(number, self._arrived) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        self._postponed = True
        try:
            yield
        finally:
            self._postponed = False

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        first = self._signal is None
        if first:
            self._signal = number
        if not (first and self._postponed):
            raise KeyboardInterrupt
