"""A log is lines of JSON, whatever is said in them."""

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from protocol.logs import event, setup_logging

log = logging.getLogger("kvferry.test")

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """What was logged, each line parsed. The root logger is as before afterwards."""
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = []
    setup_logging("decode-1")
    yield lambda: [json.loads(line) for line in stderr.getvalue().split("\n")[:-1]]
    root.handlers = handlers
    root.setLevel(level)


def test_an_event_is_one_line_with_its_fields(lines: Lines) -> None:
    event(log, "request accepted", request="r-1", tokens=7)
    (line,) = lines()
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert line == {
        "level": "info",
        "process": "decode-1",
        "logger": "kvferry.test",
        "event": "request accepted",
        "request": "r-1",
        "tokens": 7,
    }


@pytest.mark.parametrize("text", ["two\nlines", "Grüße 🌍", 'a "quote"', "\u2028", "\ud800"], ids=ascii)
def test_no_text_breaks_a_line_or_gets_lost(lines: Lines, text: str) -> None:
    event(log, text, logging.WARNING, reason=text)
    (line,) = lines()
    assert (line["event"], line["reason"], line["level"]) == (text, text, "warning")


def test_an_exception_comes_with_its_traceback_on_the_same_line(lines: Lines) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("it failed")
    (line,) = lines()
    assert line["level"] == "error" and "ValueError: broken" in line["traceback"]
    assert "test_logs.py" in line["traceback"]


def test_a_value_that_is_no_json_is_told_in_its_own_words(lines: Lines) -> None:
    event(log, "odd", value={1}, error=ValueError("x"))
    (line,) = lines()
    assert (line["value"], line["error"]) == ("{1}", "x")


def test_what_is_below_the_level_is_not_written(lines: Lines) -> None:
    log.debug("too much")
    assert lines() == []
