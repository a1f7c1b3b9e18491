"""One worker as the main process sees it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from engine.tensor_parallel import Shard
from engine.workers.channel import Channel
from engine.workers.messages import OTHERS_GONE, Answer

_STDERR = 2
"""Of the main process: its standard output is for results."""
EXIT_S = 5.0
"""For a worker to end once it was told to, or once its socket was closed by its own end."""


class WorkerProcess:
    """Started by `spawn`. Its life is tied to the thread that started it (see `parent`)."""

    def __init__(self, name: str, shard: Shard, process: "subprocess.Popen[bytes]", channel: Channel[Answer]) -> None:
        self.name = name
        self.shard = shard
        self.channel = channel
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Negative: of the signal that ended it. None while it lives."""
        return self._process.poll()

    def wait(self, timeout_s: float = EXIT_S) -> int | None:
        """Its exit status; None if it still lives then."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self, timeout_s: float = 0.0) -> None:
        """Killed, unless it ends by itself in time. Nothing of it is left; its channel stays open. May be called
        again."""
        if self.wait(timeout_s) is None:
            self._process.kill()
            self._process.wait()

    def describe_end(self) -> str:
        """How it ended, in words."""
        status = self.exit_status
        if status is None:
            return "has closed its socket"
        if status == OTHERS_GONE:
            return "gave up waiting for another rank"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def spawn(name: str, shard: Shard, timeout_s: float) -> WorkerProcess:
    """`timeout_s`: for anything that is sent to it to be taken. It gets no terminal signals, only what we send."""
    ours, theirs = socket.socketpair()
    ours.settimeout(timeout_s)
    with ExitStack() as undo, theirs:
        undo.callback(ours.close)
        command = [sys.executable, "-m", "engine.workers", str(theirs.fileno()), str(os.getpid()), name]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        undo.pop_all()
    return WorkerProcess(name, shard, process, Channel(ours, Answer))


def tell(workers: Sequence[WorkerProcess], record: msgspec.Struct, fds: Sequence[int] = ()) -> None:
    """All of them the same. Raises PeerGone or TimeoutError where one is gone or hangs."""
    if workers:
        encoded = workers[0].channel.encode(record)
        for worker in workers:
            worker.channel.send_encoded(encoded, fds)
