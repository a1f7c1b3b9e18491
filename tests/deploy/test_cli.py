import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from deploy.cli import PROGRAMS, ROLES, main
from protocol.curve import read_cluster_key

DEADLINE_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
STARTING = """
import signal, sys
from importlib.abc import MetaPathFinder
from deploy.cli import main

class NeverEnding(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "deploy.up":
            print("importing", flush=True)
            sys.stdin.read()

sys.meta_path.insert(0, NeverEnding())
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(["up"]))
"""
"""The program, one of its imports never coming to an end."""


@pytest.mark.parametrize("command", ["up", "down", "demo", "doctor", "key"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert f"usage: kvferry {command}" in capsys.readouterr().out


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(command in shown for command in [*PROGRAMS, "up", "down", "demo", "doctor"])


@pytest.mark.parametrize("role", ROLES)
def test_a_role_answers_help_itself(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([role, "--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ")
    assert "--cluster-key" in shown


def test_generating_without_a_cluster_is_the_engines_own_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "--help"])
    assert exit_.value.code == 0
    assert "usage: kvferry generate" in capsys.readouterr().out
    assert main(["generate", "--model", "/nonexistent", "--input", "/nonexistent", "--output", "-"]) == 2
    assert "kvferry generate: " in capsys.readouterr().err


def test_an_unusable_model_folder_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--model", "/nonexistent"]) == 2
    assert "kvferry up: /nonexistent is no Hugging Face model folder" in capsys.readouterr().err


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["sideways"])
    assert exit_.value.code == 2
    assert "sideways" in capsys.readouterr().err


def test_a_new_key_is_usable_and_never_replaces_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.key"
    assert main(["key", str(file)]) == 0
    key = read_cluster_key(file)
    assert main(["key", str(file)]) == 1
    assert "never replaced" in capsys.readouterr().err
    assert read_cluster_key(file) == key


def test_an_unreadable_record_is_named_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    record = tmp_path / ".kvferry" / "run" / "cluster.json"
    record.parent.mkdir(parents=True)
    record.write_text("{bad")
    assert main(["down"]) == 2
    assert str(record.relative_to(tmp_path)) in capsys.readouterr().err


def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTING], cwd=ROOT, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "importing\n"
        program.send_signal(signal.SIGINT)
        _, complaint = program.communicate(timeout=DEADLINE_S)
    assert (program.returncode, complaint) == (130, "kvferry: interrupted\n")


def test_nothing_that_takes_long_is_imported_before_the_command_is_known() -> None:
    program = "import sys, deploy.cli; print(*{name.partition('.')[0] for name in sys.modules})"
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=PIPE, text=True, check=True).stdout
    assert not {"torch", "httpx", "zmq", "fabric", "engine", "asyncio"} & set(shown.split())
