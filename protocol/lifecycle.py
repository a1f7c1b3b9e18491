"""Running until told to stop."""

import signal
import threading
from collections.abc import Callable
from types import FrameType

CHECK_S = 1.0


class StopSignal:
    """SIGTERM and SIGINT, as something to wait for. Create it on the main thread before starting others."""

    def __init__(self) -> None:
        self._event = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._received)

    def wait_unless(self, broken: Callable[[], str | None]) -> str | None:
        """Wait for the signal (None), or until `broken`, asked every second, gives a reason to stop at once."""
        while not self._event.wait(CHECK_S):
            reason = broken()
            if reason is not None:
                return reason
        return None

    def _received(self, number: int, frame: FrameType | None) -> None:
        self._event.set()
