"""Starts `tests.fabric.writer` as a real process and reads its lines with a deadline."""

import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from fabric.api import Landing, RemoteRegion

ROOT = Path(__file__).resolve().parents[2]


class WriterProcess:
    """A peer that writes over and over; ends with `kill`, which is SIGKILL, or when its writes fail."""

    def __init__(self, provider: str, landing: Landing, target: RemoteRegion, page: int, immediate: int) -> None:
        self._order = {
            "provider": provider,
            "landing": landing.address.hex(),
            "key": target.key,
            "base": target.base,
            "length": target.length,
            "page": page,
            "immediate": immediate,
        }
        self._lines: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fabric.writer"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(self._order) + "\n")
        self._process.stdin.flush()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(line.strip())

    def says(self) -> str | None:
        """A line that was printed, or None while there is none."""
        return self._lines.get_nowait() if not self._lines.empty() else None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        self._reader.join(10)
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
