"""What whoever watches a batch sees."""

import io

import pytest

from engine.batch_progress import BatchProgress
from engine.batch_run import Totals
from tests.engine.traces import Harness


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def shown(monkeypatch: pytest.MonkeyPatch, terminal: bool, quiet: bool) -> str:
    screen = Screen(terminal)
    monkeypatch.setattr("sys.stderr", screen)
    progress = BatchProgress(Harness().engine, 4, quiet)
    progress.show(Totals(lines=3))
    progress.close(Totals(lines=4, failed=1, prompt_tokens=20, tokens=8))
    return screen.getvalue()


def test_a_terminal_has_a_bar_and_a_line_of_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, terminal=True, quiet=False)
    assert "3/4 prompts" in text and "0 tokens/s" in text
    assert "4 prompts, 1 failed; 20 prompt tokens, 8 new ones in " in text


def test_elsewhere_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = shown(monkeypatch, terminal=False, quiet=False).splitlines()
    assert line.startswith("4 prompts, 1 failed")


def test_quiet_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, terminal=True, quiet=True) == ""
