"""The thread that owns an engine."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from engine.engine import Engine
from engine.errors import DeviceLost, EngineError, LoopPaused, LoopStopped
from engine.outputs import StepOutput
from engine.workers.group import NOTICE_S
from engine.workers.runner import SILENCE_S

STEP_S = SILENCE_S + NOTICE_S + 8.0
"""No step takes longer: by then, a rank that hangs has ended its engine."""

log = logging.getLogger(__name__)

T = TypeVar("T")


class EngineLoop:
    """Steps the engine while it has work, sleeps while it has none.

    `on_step` gets the output of each step, also of one that reports nothing, on the engine's thread, and may use the
    engine there. What it raises ends the loop, as an exception of the engine's own does, and the loss of a process that
    the engine is made of: `alive` turns False and `error` says why. `on_end` is called last on that thread, whatever
    ended it.
    """

    def __init__(
        self, engine: Engine, on_step: Callable[[StepOutput], None], on_end: Callable[[], None] = lambda: None
    ) -> None:
        self._engine = engine
        self._on_step = on_step
        self._on_end = on_end
        self._inbox: deque[tuple[Callable[[Engine], Any], Future[Any] | None]] = deque()
        self._wake = threading.Condition()
        self._holders: Counter[int] = Counter()
        """Threads that keep it paused, by identifier, and how many times each."""
        self._between_steps = True
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.error: BaseException | None = None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def paused_by_caller(self) -> bool:
        """Whether the calling thread holds a pause."""
        return threading.get_ident() in self._holders

    def start(self) -> None:
        self._thread.start()
        self._engine.when_lost(self._end_with)

    def stop(self, timeout_s: float = STEP_S) -> None:
        """Run what was submitted, then end after the current step, leaving the requests as they are. May be called
        again. Raises TimeoutError if a step, or another thread's pause, does not end in time, and LoopPaused inside
        a pause of the caller's own."""
        if self.paused_by_caller:
            raise LoopPaused("stopping would wait for the caller's own pause: leave it first")
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's thread has not ended within {timeout_s} s")

    @contextmanager
    def pause(self, timeout_s: float = STEP_S) -> Iterator[None]:
        """Park the loop between steps: inside the `with` no step runs and no submitted call. From any thread but the
        engine's own; several may hold it, each more than once, and the last one out lets it go on. The last forward of
        an asynchronous engine may still be under way.

        A loop that has ended, or not yet started, is parked. Raises TimeoutError if a step does not end in time.
        """
        assert threading.current_thread() is not self._thread, "the engine's thread cannot wait for itself"
        holder = threading.get_ident()
        with self._wake:
            self._holders[holder] += 1
        try:
            self._wait_until_parked(timeout_s)
            yield
        finally:
            self._let_go(holder)

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

    def _end_with(self, error: DeviceLost) -> None:
        """The engine is of no use any more, though it may have nothing to do."""

        def raise_it(_: Engine) -> None:
            raise error

        with suppress(LoopStopped):
            self.post(raise_it)

    def _put(self, call: Callable[[Engine], Any], future: "Future[Any] | None") -> None:
        with self._wake:
            if self._stopping:
                raise LoopStopped(f"the engine's thread has ended: {self.error or 'it was stopped'}")
            self._inbox.append((call, future))
            self._wake.notify_all()

    def _wait_until_parked(self, timeout_s: float) -> None:
        with self._wake:
            if not self._wake.wait_for(lambda: self._between_steps, timeout_s):
                raise TimeoutError(f"the engine's step has not ended within {timeout_s} s")

    def _let_go(self, holder: int) -> None:
        with self._wake:
            self._holders[holder] -= 1
            if not self._holders[holder]:
                del self._holders[holder]
            self._wake.notify_all()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._run_inbox()
                if self._engine.has_work:
                    self._on_step(self._engine.step())
        except DeviceLost as error:  # whoever lost it has said so
            self.error = error
        except BaseException as error:
            log.exception("the engine's thread ends")
            self.error = error
        finally:
            self._refuse_rest()
            self._on_end()

    def _wait_for_work(self) -> bool:
        """False when told to stop and the inbox is empty."""
        with self._wake:
            self._between_steps = True
            if self._holders:
                self._wake.notify_all()
            self._wake.wait_for(self._may_go_on)
            self._between_steps = False
            return bool(self._inbox) or not self._stopping

    def _may_go_on(self) -> bool:
        return not self._holders and (bool(self._inbox) or self._stopping or self._engine.has_work)

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

    def _refuse_rest(self) -> None:
        with self._wake:
            self._stopping = self._between_steps = True
            rest, self._inbox = list(self._inbox), deque()
            self._wake.notify_all()
        for _, future in rest:
            if future is not None:
                future.cancel()
