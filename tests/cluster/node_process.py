"""Node processes that start in a second: forked from a server that has imported torch and both roles already.

Each is what `python -m prefill_node ARGUMENTS` is: a process of its own with its own session, whose `main` reads the
arguments. Tests of the command line itself start nodes the long way.
"""

import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal

from deploy.attended import PR_SET_PDEATHSIG
from tests.cluster import faulty_transport

Role = Literal["prefill", "decode"]
_PROGRAMS = {"prefill": "prefill_node.__main__", "decode": "decode_node.__main__"}
_END_S = 60.0
_DESCRIPTORS = 4096

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([*_PROGRAMS.values(), __name__])


class NodeProcess:
    """Runs from construction on. The fork server ends with the process that started it, and this one with the fork
    server, by the kernel. `log`: where both outputs go. `script`: what its transport does wrong."""

    def __init__(self, role: Role, arguments: list[str], log: Path, script: Path | None = None) -> None:
        self.log = log
        told = (role, arguments, str(log), str(script) if script else None)
        self._process: ForkServerProcess = _context.Process(target=_become, args=told)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: ended by that signal."""
        return self._process.exitcode

    def kill(self) -> None:
        """kill -9, and wait until the kernel has done it."""
        self._process.kill()
        self.wait()

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def wait(self) -> int | None:
        """Its exit code; None if it does not end."""
        self._process.join(_END_S)
        return self._process.exitcode

    def events(self) -> list[dict[str, Any]]:
        """The events of its log."""
        return events_in(self.log)


def events_in(log: Path) -> list[dict[str, Any]]:
    """The whole JSON lines of a log."""
    lines = log.read_text(errors="replace").splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


def _become(role: Role, arguments: list[str], log: str, script: str | None) -> None:
    os.setsid()
    os.closerange(3, _DESCRIPTORS)  # one of them keeps the fork server alive, and through it this process
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    if script is not None:
        sys.exit(faulty_transport.run(_PROGRAMS[role], arguments, script))
    sys.exit(importlib.import_module(_PROGRAMS[role]).main(arguments))
