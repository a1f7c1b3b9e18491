"""The one place that polls: another process shows its state only to those who ask."""

import time
from collections.abc import Callable
from threading import Event

DEADLINE_S = 40.0
"""For what a healthy cluster does soon, on a machine with much else to do."""
_POLL_S = 0.05


def eventually(holds: Callable[[], bool], what: str, seconds: float = DEADLINE_S) -> None:
    """Asked again until it holds; `what`, for people, where it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        Event().wait(_POLL_S)
