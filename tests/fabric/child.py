"""Peers as real child processes: one JSON line in, printed lines out, ended by SIGKILL."""

import json
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fabric.api import Landing, RailKey, RemoteRegion

ROOT = Path(__file__).resolve().parents[2]
LOOPBACK = "127.0.0.1"


class ChildProcess:
    """Runs a module of this folder; `order` is what it is told on stdin."""

    def __init__(self, module: str, order: dict[str, Any]) -> None:
        self._module = module
        self._order = order
        self._lines: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"tests.fabric.{self._module}"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin
        self._process.stdin.write(json.dumps(self._order) + "\n")
        self._process.stdin.flush()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(line.strip())

    def line(self, deadline: float = 20.0) -> str:
        """The next line that it prints."""
        return self._lines.get(timeout=deadline)

    def says(self) -> str | None:
        """A line that was printed, or None while there is none."""
        return self._lines.get_nowait() if not self._lines.empty() else None

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        self._reader.join(10)
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()


def writer(
    provider: str, landing: Landing, target: RemoteRegion, page: int, immediate: int, node: str = LOOPBACK
) -> ChildProcess:
    """A peer that writes to the landing over and over, see `tests.fabric.writer`."""
    order = {
        "provider": provider,
        "node": node,
        "landing": landing.address.hex(),
        "keys": target.keys,
        "base": target.base,
        "length": target.length,
        "page": page,
        "immediate": immediate,
    }
    return ChildProcess("writer", order)


def told_region(told: dict[str, Any]) -> RemoteRegion:
    return RemoteRegion(tuple(RailKey(*pair) for pair in told["keys"]), told["base"], told["length"])


class TargetProcess(ChildProcess):
    """A peer that receives; `address` and `remote` once it runs, see `tests.fabric.target`."""

    def __init__(self, provider: str) -> None:
        super().__init__("target", {"provider": provider})

    def __enter__(self) -> Self:
        super().__enter__()
        told = json.loads(self.line())
        self.address = bytes.fromhex(told["address"])
        self.remote = told_region(told)
        return self
