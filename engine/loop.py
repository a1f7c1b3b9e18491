"""The thread that owns an engine."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from engine.engine import Engine
from engine.errors import EngineError, LoopStopped
from engine.outputs import StepOutput

log = logging.getLogger(__name__)

T = TypeVar("T")


class EngineLoop:
    """Steps the engine while it has work, sleeps while it has none.

    `on_step` gets each step's output on the engine's thread, and may use the engine there. What it raises ends the
    loop, as an exception of the engine's own does: `alive` turns False and `error` says why.
    """

    def __init__(self, engine: Engine, on_step: Callable[[StepOutput], None]) -> None:
        self._engine = engine
        self._on_step = on_step
        self._inbox: deque[tuple[Callable[[Engine], Any], Future[Any] | None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.error: BaseException | None = None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Run what was submitted, then end after the current step, leaving the requests as they are. May be called
        again. Raises TimeoutError if a step does not end in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's thread has not ended within {timeout_s} s")

    def submit(self, call: Callable[[Engine], T]) -> "Future[T]":
        """Run `call(engine)` on the engine's thread, between steps, in order of submission. From any thread.

        Its result or exception is the future's; an exception other than EngineError is logged as well. Raises
        LoopStopped once the loop has ended or was told to.
        """
        future: Future[T] = Future()
        self._put(call, future)
        return future

    def post(self, call: Callable[[Engine], Any]) -> None:
        """As `submit`, for a call that nobody waits for: if it raises, that is a bug, and it ends the loop."""
        self._put(call, None)

    def _put(self, call: Callable[[Engine], Any], future: "Future[Any] | None") -> None:
        with self._wake:
            if self._stopping:
                raise LoopStopped(f"the engine's thread has ended: {self.error or 'it was stopped'}")
            self._inbox.append((call, future))
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._run_inbox()
                if self._engine.has_work:
                    self._report(self._engine.step())
        except BaseException as error:
            log.exception("the engine's thread ends")
            self.error = error
        finally:
            self._refuse_rest()

    def _wait_for_work(self) -> bool:
        """False when told to stop and the inbox is empty."""
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._stopping or self._engine.has_work)
            return bool(self._inbox) or not self._stopping

    def _run_inbox(self) -> None:
        while self._inbox:
            call, future = self._inbox.popleft()
            if future is None:
                call(self._engine)
            elif future.set_running_or_notify_cancel():
                self._answer(call, future)

    def _answer(self, call: Callable[[Engine], Any], future: "Future[Any]") -> None:
        try:
            future.set_result(call(self._engine))
        except EngineError as error:
            future.set_exception(error)
        except Exception as error:
            log.exception("a call on the engine's thread failed")
            future.set_exception(error)

    def _report(self, output: StepOutput) -> None:
        if output:
            self._on_step(output)

    def _refuse_rest(self) -> None:
        with self._wake:
            self._stopping = True
            rest, self._inbox = list(self._inbox), deque()
        for _, future in rest:
            if future is not None:
                future.cancel()
