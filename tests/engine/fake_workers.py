"""Workers that load nothing, being processes that do what a script says; and what becomes of processes."""

import gc
import os
import select
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from engine.engine import Engine
from engine.errors import DeviceLost
from engine.tensor_parallel import Shard
from engine.workers.channel import Channel
from engine.workers.group import WorkerGroup
from engine.workers.messages import Answer
from engine.workers.process import WorkerProcess

DEADLINE_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
_BEFORE = """\
import os, signal, socket, sys
from engine.workers.channel import Channel
from engine.workers.messages import *
from engine.workers.messages import FAILED, OTHERS_GONE, WELL
channel = Channel(socket.socket(fileno=int(sys.argv[1])), Order)
"""
OBEY = """\
while not isinstance(order := channel.receive(), Stop):
    channel.send(Done([], 1, 2))
"""
"""A main rank's: answers forwards, until told to stop."""
LISTEN = """\
while not isinstance(order := channel.receive(), Stop):
    pass
"""
"""Another rank's."""


def fake_worker(rank: int, world: int, script: str, timeout_s: float = DEADLINE_S) -> WorkerProcess:
    ours, theirs = socket.socketpair()
    ours.settimeout(timeout_s)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _BEFORE + script, str(theirs.fileno())], pass_fds=[theirs.fileno()], cwd=ROOT
        )
    return WorkerProcess(f"rank {rank}", Shard(rank, world), process, Channel(ours, Answer))


class FakeGroup(WorkerGroup):
    """`pids`: in order of rank."""

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        super().__init__(workers)
        self.pids = [worker.pid for worker in workers]


def fake_group(*scripts: str, timeout_s: float = DEADLINE_S) -> FakeGroup:
    """It listens already."""
    group = FakeGroup([fake_worker(rank, len(scripts), script, timeout_s) for rank, script in enumerate(scripts)])
    group.start()
    return group


def wait_until_gone(pid: int) -> None:
    """For a process of whomever."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        readable, _, _ = select.select([handle], [], [], DEADLINE_S)
        assert readable, f"process {pid} is still there"
    finally:
        os.close(handle)


def open_files() -> Counter[str]:
    """What this process has open, by name; garbage, of other tests too, is gone first."""
    gc.collect()
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return Counter(os.readlink(link) for link in links if link.is_symlink())


def children() -> list[int]:
    """Processes that this one started and that are still there, dead ones that nobody has waited for included."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                if _parent(process) == os.getpid():
                    found.append(int(process.name))
    return sorted(found)


def workers_but(before: Collection[int]) -> dict[str, int]:
    """Workers that this process has started since, by the names that their command lines end with."""
    return {_words(pid)[-1]: pid for pid in children() if pid not in before and "engine.workers" in _words(pid)}


def _words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]


def _parent(process: Path) -> int:
    """The command, in brackets, may hold anything."""
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])


class Stepped(threading.Thread):
    """One step, and what it raised."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(daemon=True)
        self._engine = engine
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._engine.step()
        except DeviceLost as error:
            self.error = error

    def ended(self) -> str:
        self.join(DEADLINE_S)
        assert not self.is_alive(), "the step hangs"
        return str(self.error)
