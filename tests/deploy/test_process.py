import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.process import POLL_S, Child, ProcessId, spawn, start_time

DEADLINE_S = 20.0
SLEEPER = "import signal, sys; print('up', flush=True); signal.pause()"
STUBBORN = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
PARENT_OF_ONE = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    "print('child', child.pid, flush=True)\n"
    "child.wait()\n"
)
LEAVES_ONE = PARENT_OF_ONE.replace("child.wait()", "sys.exit(7)")


def start(tmp_path: Path, program: str, name: str = "program") -> Child:
    return spawn(name, [sys.executable, "-c", program], tmp_path / f"{name}.log", {})


def printed(child: Child, prefix: str) -> str:
    """Wait until it has printed a line that begins with `prefix`; the rest of that line."""
    deadline = time.monotonic() + DEADLINE_S
    ended = False
    while (value := child.value_after(prefix)) is None:
        assert not ended and time.monotonic() < deadline, child.last_lines()
        ended = child.id.wait(POLL_S)  # it may have printed just before: look once more
    return value


def stop(child: Child) -> bool:
    child.terminate()
    return child.finish(time.monotonic() + DEADLINE_S)


def ended(child: Child) -> int:
    """Wait for its end; its exit code."""
    assert child.id.wait(DEADLINE_S)
    assert child.exit_code is not None
    return child.exit_code


def unreaped(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def identify(pid: int) -> ProcessId:
    started = start_time(pid)
    assert started is not None
    return ProcessId(pid, started)


def test_a_child_is_alive_until_it_is_asked_to_stop(tmp_path: Path) -> None:
    child = start(tmp_path, SLEEPER)
    printed(child, "up")
    assert child.id.alive
    assert child.exit_code is None
    assert not stop(child)
    assert child.exit_code == -signal.SIGTERM
    assert "was killed by SIGTERM; its log ends:\n" in child.end
    assert not child.id.alive


def test_one_that_ignores_sigterm_is_killed_at_the_deadline(tmp_path: Path) -> None:
    child = start(tmp_path, STUBBORN)
    printed(child, "up")
    child.terminate()
    assert child.finish(time.monotonic() + 0.2)
    assert child.exit_code == -signal.SIGKILL


def test_its_own_children_end_with_it(tmp_path: Path) -> None:
    child = start(tmp_path, PARENT_OF_ONE)
    grandchild = identify(int(printed(child, "child ")))
    stop(child)
    assert grandchild.wait(DEADLINE_S)


def test_what_an_ended_one_left_behind_is_killed_while_its_number_is_still_its_own(tmp_path: Path) -> None:
    child = start(tmp_path, LEAVES_ONE)
    orphan = identify(int(printed(child, "child ")))
    assert ended(child) == 7
    assert unreaped(child.id.pid)
    assert orphan.alive
    assert not child.finish(time.monotonic() + DEADLINE_S)
    assert orphan.wait(DEADLINE_S)
    assert not unreaped(child.id.pid)
    assert not child.finish(time.monotonic())
    assert child.exit_code == 7
    assert "ended with code 7; its log ends:\nchild " in child.end


def test_a_child_dies_when_its_launcher_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from deploy.process import spawn\n"
        f"child = spawn('c', [sys.executable, '-c', {SLEEPER!r}], Path({str(tmp_path / 'c.log')!r}), {{}})\n"
        "print(child.id.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    assert launcher.stdin is not None
    with launcher.stdout, launcher.stdin:
        child = identify(int(launcher.stdout.readline()))
        assert child.alive
        launcher.kill()
        launcher.wait(DEADLINE_S)
    assert child.wait(DEADLINE_S)


def test_a_process_with_a_recycled_pid_is_not_signalled() -> None:
    ours = identify(os.getpid())
    stranger = ProcessId(ours.pid, ours.started - 1)
    assert not stranger.alive
    assert not stranger.send(signal.SIGKILL)


def test_an_ended_process_is_not_alive_even_before_it_is_reaped() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert start_time(process.pid) is None


def test_a_line_counts_only_once_it_is_whole(tmp_path: Path) -> None:
    child = start(tmp_path, SLEEPER)
    try:
        printed(child, "up")
        child.log.write_text("router listening on http://127")
        assert child.value_after("router listening on ") is None
        child.log.write_text("noise\nrouter listening on http://127.0.0.1:1\n")
        assert child.value_after("router listening on ") == "http://127.0.0.1:1"
    finally:
        stop(child)


def test_what_it_said_last_is_at_hand(tmp_path: Path) -> None:
    child = start(tmp_path, "import sys; sys.exit('no such model')")
    assert child.id.wait(DEADLINE_S)
    stop(child)
    assert child.last_lines() == "no such model"


@pytest.mark.parametrize("pid", [2**22 + 1, 0])
def test_no_process_has_no_start_time(pid: int) -> None:
    assert start_time(pid) is None
