"""Running until told to stop."""

import signal
import threading
from types import FrameType


class StopSignal:
    """SIGTERM and SIGINT, as something to wait for. Create it on the main thread before starting others."""

    def __init__(self) -> None:
        self._event = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._received)

    def wait(self) -> None:
        self._event.wait()

    def _received(self, number: int, frame: FrameType | None) -> None:
        self._event.set()
