"""The life of a node's process: build, start, run until told to stop, drain, close."""

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, Protocol

from protocol.logs import event

CHECK_S = 1.0

log = logging.getLogger(__name__)


class Node(Protocol):
    """What a process runs. `drain` waits at most `grace_s` for what is under way; False if some of it was cut off."""

    def start(self) -> None: ...

    def unhealthy(self) -> str | None: ...

    def drain(self, grace_s: float) -> bool: ...

    def close(self) -> None: ...


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


def run_node(program: str, build: Callable[[], Node], refusals: tuple[type[Exception], ...], grace_s: float) -> int:
    """The exit code: 0 after a clean stop, 1 if it could not start (one line on stderr says why), 3 if work was cut
    off at the end of the grace period. `refusals`: what `build` and `start` raise when the machine or the options are
    at fault. Does not return if one of the node's threads died: the process ends at once, with code 4."""
    stop = StopSignal()
    try:
        node = build()
        node.start()
    except refusals as error:
        return _complain(program, str(error), 1)
    gc.collect()
    gc.freeze()  # what was built is there to stay: full collections took 0.1 s to look at it again
    broken = stop.wait_unless(node.unhealthy)
    if broken is not None:
        _end_at_once(_complain(program, f"{broken}; restart this node", 4))
    event(log, "draining", grace_s=grace_s)
    drained = node.drain(grace_s)
    node.close()
    event(log, "stopped", cut_off=not drained)
    return 0 if drained else 3


def _end_at_once(code: int) -> NoReturn:
    """Other engines of the node may be computing. The interpreter's own end would unwind their threads through C++,
    which aborts the process."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _complain(program: str, reason: str, code: int) -> int:
    sys.stderr.write(f"{program}: {reason}\n")
    return code
