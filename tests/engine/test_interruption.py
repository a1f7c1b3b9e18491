"""What a signal does, by when it comes."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.interruption import SIGNALS, Interruption

DEADLINE_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
STARTING = """
import sys, types
from engine.__main__ import main

def run_command(*_):
    print("started", flush=True)
    sys.stdin.read()

sys.modules["engine.batch_command"] = types.SimpleNamespace(run_command=run_command)
sys.exit(main([]))
"""
"""The program, its start never coming to an end."""


class Ended(Exception):
    """Instead of the process."""


def end(code: int) -> None:
    raise Ended(code)


@pytest.fixture
def interruption() -> Interruption:
    return Interruption("prog: interrupted", end)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_process_with_one_line(
    interruption: Interruption, number: signal.Signals, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    with pytest.raises(Ended, match=str(code)), interruption.watched():
        signal.raise_signal(number)
    assert capfd.readouterr().err == "prog: interrupted\n"
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_where_it_is_postponed_the_first_one_asks_and_the_second_one_ends(
    interruption: Interruption, capfd: pytest.CaptureFixture[str]
) -> None:
    with interruption.watched(), interruption.postponed():
        assert not interruption.requested
        signal.raise_signal(signal.SIGTERM)
        assert interruption.requested and interruption.exit_code == 143
        assert capfd.readouterr().err == ""
        with pytest.raises(Ended, match="143"):
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "prog: interrupted\n"


def test_kvferry_generate_watches_from_its_start() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTING],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"started\n"
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, error) == (143, b"kvferry generate: interrupted\n")
