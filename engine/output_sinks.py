"""Who gets the outputs of a request."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, Self

from engine.generation_output import GenerationOutput
from engine.snapshot import Snapshot

log = logging.getLogger(__name__)


class OutputSink(Protocol):
    """Called from any thread; must neither block nor raise."""

    def open(self, request_id: str) -> bool:
        """Outputs of that request will come; False if it cannot be told from another."""

    def put(self, snapshot: Snapshot) -> None: ...

    def close(self, request_id: str) -> None:
        """No output of it will come after all."""


class EventLoopSink:
    """Has an asyncio loop call `callback` with each output, in order."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop, callback: Callable[[GenerationOutput], None]) -> None:
        self._event_loop = event_loop
        self._callback = callback

    @classmethod
    def here(cls, callback: Callable[[GenerationOutput], None]) -> Self:
        """On the loop that runs in the calling thread."""
        return cls(asyncio.get_running_loop(), callback)

    def open(self, request_id: str) -> bool:
        return True

    def put(self, snapshot: Snapshot) -> None:
        try:
            self._event_loop.call_soon_threadsafe(lambda: self._callback(snapshot.output()))
        except RuntimeError:
            log.warning("nobody hears of request %s any more: its asyncio loop is closed", snapshot.request_id)

    def close(self, request_id: str) -> None: ...
