"""Structured logs: one JSON object per line on stderr, one line per event at a border."""

import json
import logging
import sys
import time
from typing import Any


class _JsonLines(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def setup_logging(process: str, level: int = logging.INFO) -> None:
    """Call once, in a process's main; `process` names it in every line. Replaces the root logger's handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(process))
    logging.basicConfig(handlers=[handler], level=level, force=True)


def event(logger: logging.Logger, name: str, level: int = logging.INFO, **fields: object) -> None:
    """One event with its fields, e.g. event(log, "request accepted", request=key)."""
    logger.log(level, name, extra={"fields": fields})
