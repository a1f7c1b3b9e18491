"""One process of a local cluster: its own session, its log file, its end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A pid and when its process started (clock ticks since boot), so that a recycled pid is never taken for it."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        return start_time(self.pid) == self.started

    def send(self, number: signal.Signals) -> bool:
        """Signal exactly this process; False if it is gone, whoever has its pid now."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.alive:  # asked after opening: from here on the handle cannot change hands
                return False
            signal.pidfd_send_signal(handle, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)

    def wait(self, seconds: float) -> bool:
        """Whether it ended within `seconds`."""
        deadline = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None where no such process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces
    return None if fields[0] in "ZX" else int(fields[19])


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"


class Child:
    """A running process, started by `spawn`. Owned by the launcher's main thread: the kernel ties its life to it."""

    def __init__(self, name: str, log: Path, popen: "subprocess.Popen[bytes]", started: int) -> None:
        self.name = name
        self.log = log
        self.id = ProcessId(popen.pid, started)
        self._popen = popen

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: ended by that signal. Does not reap it: its pid stays its own."""
        if self._popen.returncode is not None:
            return self._popen.returncode
        ended = os.waitid(os.P_PID, self.id.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    @property
    def end(self) -> str:
        """Of one that has ended: how, and the last of what it said."""
        code = self.exit_code
        assert code is not None
        how = f"ended with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
        return f"{self.name} {how}; its log ends:\n{self.last_lines()}"

    def last_lines(self, count: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def value_after(self, prefix: str) -> str | None:
        """The rest of the first whole log line that begins with `prefix`."""
        for line in self.log.read_text(errors="replace").splitlines(keepends=True):
            if line.startswith(prefix) and line.endswith("\n"):
                return line.removeprefix(prefix).strip()
        return None

    def terminate(self) -> None:
        """Ask it to stop; a no-op once it has."""
        self.id.send(signal.SIGTERM)

    def finish(self, deadline: float) -> bool:
        """Wait until the monotonic `deadline`, then kill what is left of its group and reap it; True if it had to be
        killed. Does nothing once it is reaped: the group's number may be another's by then."""
        if self._popen.returncode is not None:
            return False
        killed = not self._ends_by(deadline)
        os.killpg(self.id.pid, signal.SIGKILL)
        self._popen.wait()
        return killed

    def _ends_by(self, deadline: float) -> bool:
        while self.exit_code is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def spawn(name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
    """Start `command` in a session of its own, both outputs to `log` (replaced), dying with the calling process."""
    attended = [sys.executable, "-m", "deploy.attended", str(os.getpid()), *command]
    with log.open("wb") as output:
        popen = subprocess.Popen(
            attended,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    started = start_time(popen.pid)
    return Child(name, log, popen, -1 if started is None else started)
