"""All workers of one engine: what is said to them together, and the thread that listens to them."""

import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

import msgspec
import torch

from engine.errors import DeviceLost
from engine.runner import ForwardResult
from engine.workers.channel import PeerGone
from engine.workers.messages import OTHERS_GONE, Answer, Done, Failed, Loaded, Ready, Stop
from engine.workers.process import EXIT_S, WorkerProcess, tell

NOTICE_S = 2.0
"""From a worker's death to its being noticed, at most."""

log = logging.getLogger(__name__)


class WorkerGroup:
    """They end together: when one of them is lost, the others are killed, forwards under way fail, and `lost` says why,
    for ever. `start` begins to listen. Methods are for any thread; `close` is for one."""

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        self.lost: str | None = None
        self._workers = workers
        self._answered: dict[type[Answer], int] = {Loaded: 0, Ready: 0}
        self._forwards: deque[Future[ForwardResult]] = deque()
        self._on_lost: Callable[[DeviceLost], None] | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._wake, self._woken = socket.socketpair()
        self._listener = threading.Thread(target=self._listen, name="workers", daemon=True)

    def start(self) -> None:
        self._listener.start()

    def when_lost(self, call: Callable[[DeviceLost], None]) -> None:
        """Called once, from whichever thread notices; at once if it has happened. Replaces the one before."""
        with self._changed:
            self._on_lost = call
            lost = self.lost
        if lost:
            call(DeviceLost(lost))

    def tell(self, record: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Raises DeviceLost."""
        if self.lost:
            raise DeviceLost(self.lost)
        try:
            tell(self._workers, record, fds)
        except (PeerGone, TimeoutError) as error:
            raise self.why_lost(error) from error

    def forward(self, record: msgspec.Struct) -> "Future[ForwardResult]":
        """Of a group whose main rank is a worker: what it answers. Raises DeviceLost, and so may the future."""
        future: Future[ForwardResult] = Future()
        with self._changed:
            self._forwards.append(future)
        try:
            self.tell(record)
        except ValueError:  # too large to be sent: nobody will answer
            with self._changed:
                self._forwards.remove(future)
            raise
        return future

    def wait_for(self, answer: type[Loaded] | type[Ready], timeout_s: float) -> None:
        """Of every worker. Raises DeviceLost."""
        with self._changed:
            everyone = self._changed.wait_for(
                lambda: self.lost or self._answered[answer] == len(self._workers), timeout_s
            )
        if not everyone:
            self.lose(f"not every worker was {answer.__name__.lower()} after {timeout_s} s")
        if self.lost:
            raise DeviceLost(self.lost)

    def why_lost(self, error: BaseException) -> DeviceLost:
        """After something that involves them has failed here: a worker that has died is at the bottom of it, or else
        `error` is."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost, NOTICE_S)
        return self.lose(f"{type(error).__name__}: {error}")

    def lose(self, reason: str) -> DeviceLost:
        """What was first given as a reason."""
        with self._changed:
            if self.lost is None:
                self.lost = reason
                log.error("%s: the engine ends", reason)
            lost, forwards, self._forwards = self.lost, self._forwards, deque()
            call, self._on_lost = self._on_lost, None
            self._changed.notify_all()
        for worker in self._workers:
            worker.end()
        for forward in forwards:
            forward.set_exception(DeviceLost(lost))
        if call:
            call(DeviceLost(lost))
        return DeviceLost(lost)

    def close(self, timeout_s: float = EXIT_S) -> None:
        """They end, well if they can in time; nothing of them is left. May be called again."""
        with self._changed:
            self._closing = True
        for worker in self._workers:
            with suppress(PeerGone, TimeoutError, OSError):
                tell([worker], Stop())
        for worker in self._workers:
            worker.end(0.0 if self.lost else timeout_s)
        self._wake.close()
        if self._listener.ident is not None:
            self._listener.join()
        self._woken.close()
        for worker in self._workers:
            worker.channel.close()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for worker in self._workers:
                selector.register(worker.channel, selectors.EVENT_READ, worker)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)

    def _hear(self, worker: WorkerProcess) -> bool:
        """False once there is nothing more to hear from it."""
        try:
            answer = worker.channel.receive()
        except PeerGone:
            self._has_ended(worker)
            return False
        except (TimeoutError, ValueError) as error:
            self._lose_unless_closing(f"{worker.name} (process {worker.pid}) is out of step: {error}")
            return False
        if isinstance(answer, Failed):
            self._lose_unless_closing(f"{worker.name} failed: {answer.reason}")
        elif isinstance(answer, Done) and not worker.shard.is_main:
            self._lose_unless_closing(f"{worker.name} (process {worker.pid}) is out of step: Done came from it")
        elif isinstance(answer, Done):
            self._answer(_as_result(answer))
        else:
            with self._changed:
                self._answered[type(answer)] += 1
                self._changed.notify_all()
        return True

    def _answer(self, result: ForwardResult) -> None:
        with self._changed:
            forward = self._forwards.popleft() if self._forwards else None
        if forward:
            forward.set_result(result)

    def _has_ended(self, worker: WorkerProcess) -> None:
        """Names the one that ended first: the others may have ended because of it."""
        worker.wait(NOTICE_S)
        dead = [each for each in self._workers if each.exit_status not in (None, OTHERS_GONE)]
        first = dead[0] if dead else worker
        self._lose_unless_closing(f"{first.name} (process {first.pid}) {first.describe_end()}")

    def _lose_unless_closing(self, reason: str) -> None:
        if not self._closing:
            self.lose(reason)


def _as_result(done: Done) -> ForwardResult:
    contexts = [torch.frombuffer(bytearray(values), dtype=torch.float32) for values in done.contexts]
    return ForwardResult(done.tokens, done.started_ns, done.ended_ns, contexts)
