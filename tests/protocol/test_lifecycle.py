"""How a node's process ends, in real child processes: by its exit code and one line on stderr."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 30.0
ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import atexit, sys
from protocol.lifecycle import run_node

class Node:
    def start(self):
        {start}
        print("started", flush=True)
    def unhealthy(self):
        return {unhealthy!r}
    def drain(self, grace_s):
        print(f"drain {{grace_s}}", flush=True)
        return {drained}
    def close(self):
        print("closed", flush=True)

def build():
    {build}
    return Node()

sys.exit(run_node("kvferry test", build, (OSError, ValueError), 7.5))
"""


def child(
    *, start: str = "pass", build: str = "pass", unhealthy: str | None = None, drained: bool = True
) -> "subprocess.Popen[str]":
    source = CHILD.format(start=start, build=build, unhealthy=unhealthy, drained=drained)
    return subprocess.Popen(
        [sys.executable, "-c", source], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_closes_and_ends_it_well(number: signal.Signals) -> None:
    with child() as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out, err) == (0, "drain 7.5\nclosed\n", "")


def test_work_that_was_cut_off_is_told_by_the_exit_code_after_it_closed() -> None:
    with child(drained=False) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.terminate()
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (3, "drain 7.5\nclosed\n")


@pytest.mark.parametrize("where", ["build", "start"])
def test_what_is_wrong_with_the_machine_is_one_line_and_no_traceback(where: str) -> None:
    refuse = 'raise OSError("port 80 is taken")'
    with child(build=refuse if where == "build" else "pass", start=refuse if where == "start" else "pass") as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out, err) == (1, "", "kvferry test: port 80 is taken\n")


def test_a_bug_keeps_its_traceback() -> None:
    with child(build='raise KeyError("bug")') as process:
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1 and "Traceback" in err and "KeyError: 'bug'" in err


def test_a_node_whose_thread_died_ends_at_once_without_draining_or_unwinding_its_other_threads() -> None:
    unwound = 'atexit.register(print, "unwound")'
    with child(unhealthy="engine thread ended", start=unwound) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (4, "started\n")
    assert err == "kvferry test: engine thread ended; restart this node\n"
