"""Ctrl-C and SIGTERM, which mean the same here."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """While it is watched for, a signal ends the process at once, with `message` on standard error: an exception might
    abort it instead, inside an import of compiled code. While it is `postponed`, the first signal only asks to stop.

    `end`: given the exit code; for tests, for it must not return.
    """

    def __init__(self, message: str, end: Callable[[int], object] = os._exit) -> None:
        self._message = message
        self._end = end
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
            os.write(2, f"{self._message}\n".encode())
            self._end(self.exit_code)
