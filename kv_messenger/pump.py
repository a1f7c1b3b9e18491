"""The KV messenger's thread: the only one that calls the fabric.

One turn: run what other threads submitted, let the fabric poll, post, drain and count (in C, without the GIL), hand
its events to the owner, and tick the clock. Between events it sleeps inside `progress`.
"""

import ctypes
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Protocol

from fabric.api import Event, FabricCounters, FabricGauges, TransferEngine

TICK_S = 0.25
CALL_TIMEOUT_S = 30.0
SWITCH_INTERVAL_S = 0.0002
"""After which a thread that computes in Python lets one that waits for the GIL have it: what a notice may cost, once on
the pump's thread and once more on an engine's. Python's default of 5 ms would be most of a decode step."""
TIMER_SLACK_NS = 1000
"""By which a wait may end late, as the one for the GIL: the kernel's default of 50 us would be a quarter of it."""
_PR_SET_TIMERSLACK = 29

log = logging.getLogger(__name__)


def as_metrics(gauges: FabricGauges) -> dict[str, float]:
    """By the names that a node shows them under."""
    return {f"fabric_{name}": value for name, value in asdict(gauges).items()}


class PumpOwner(Protocol):
    """What runs on the pump's thread: a sender or a receiver."""

    def on_events(self, events: Sequence[Event]) -> None:
        """What one `progress` call reported; all of it has happened already."""

    def on_tick(self, now: float) -> None: ...


class PumpDead(RuntimeError):
    """The messenger thread has ended; the node is unhealthy and must be restarted."""


class Pump:
    """`submit` and `call` come from any thread; `fabric` is touched by the pump's thread alone after `start`. `cores`:
    CPUs that the thread is confined to; None: all of the process's."""

    def __init__(self, fabric: TransferEngine, owner: PumpOwner, cores: Collection[int] | None = None) -> None:
        self._fabric = fabric
        self._owner = owner
        self._cores = cores
        self._inbox: deque[Callable[[], None]] = deque()
        self._stopping = False
        self.fabric_counters: FabricCounters = fabric.counters()
        self.fabric_gauges: FabricGauges = fabric.gauges()
        """A snapshot of both per tick, for any thread."""
        self._thread = threading.Thread(target=self._run, name="kv-messenger", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """From then on this process's threads hand over the GIL more often, those that the caller starts later also in
        time."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0)
        self._thread.start()

    def submit(self, action: Callable[[], None]) -> None:
        """Run `action` on the pump's thread, in order of submission."""
        self._inbox.append(action)
        self._fabric.wake()

    def call(self, action: Callable[[], None]) -> None:
        """`submit`, and wait until it ran. Raises PumpDead if the thread is gone or hangs."""
        done = threading.Event()

        def run() -> None:
            action()
            done.set()

        self.submit(run)
        if not done.wait(CALL_TIMEOUT_S):
            raise PumpDead("the KV messenger thread did not answer")

    def count(self) -> FabricGauges:
        """What the fabric holds as of now. From any thread but the pump's."""
        gauges: list[FabricGauges] = []
        self.call(lambda: gauges.append(self._fabric.gauges()))
        return gauges[0]

    def close(self) -> None:
        """Runs what was submitted, then ends the thread and closes the fabric: endpoints, regions, domain."""
        self._stopping = True
        if self._thread.is_alive():
            self._fabric.wake()
            self._thread.join()
        self._fabric.close()

    def _run(self) -> None:
        try:
            if self._cores is not None:
                os.sched_setaffinity(0, self._cores)  # 0: this thread
            next_tick = time.monotonic() + TICK_S
            while not self._stopping:
                self._run_inbox()
                events = self._fabric.progress(max(0.0, next_tick - time.monotonic()))
                if events:
                    self._owner.on_events(events)
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK_S
                    self.fabric_counters, self.fabric_gauges = self._fabric.counters(), self._fabric.gauges()
                    self._owner.on_tick(time.monotonic())
            self._run_inbox()
        except Exception:
            log.exception("KV messenger thread died")
            raise

    def _run_inbox(self) -> None:
        for _ in range(len(self._inbox)):
            self._inbox.popleft()()
