from pathlib import Path

import pytest

from deploy.cli import PROGRAMS, ROLES, main
from protocol.curve import read_cluster_key


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
