"""Where the results of an offline batch go, and in which order."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from engine.batch_file import OutputLine
from engine.errors import UnusableFile


class ResultsFile:
    """`path`: None for standard output. Opened by the first `write`: until then a file that is there stays as it is."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def check(self) -> None:
        """Raises UnusableFile if it is clear already that it cannot be written."""
        if self._path is None:
            return
        folder = self._path.parent
        if self._path.is_dir():
            raise self._unusable("it is a folder")
        if not folder.is_dir():
            raise self._unusable("no such folder")
        if not os.access(self._path if self._path.exists() else folder, os.W_OK):
            raise self._unusable("permission denied")

    def write(self, line: bytes) -> None:
        """It is in the file when this returns. Raises UnusableFile."""
        try:
            if self._file is None:
                self._file = _standard_output() if self._path is None else self._path.open("wb", 0)
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise self._unusable(plain_reason(error)) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unusable(self, reason: str) -> UnusableFile:
        return UnusableFile(f"{self._path or 'standard output'}: cannot be written: {reason}")


def _standard_output() -> BinaryIO:
    """Without a buffer, which Python would try to write once more when it ends."""
    return open(sys.stdout.fileno(), "wb", 0, closefd=False)


def plain_reason(error: OSError) -> str:
    """In a few words, the path left out."""
    match error:
        case FileNotFoundError():
            return "no such file"
        case IsADirectoryError():
            return "it is a folder"
        case _:
            return (error.strerror or type(error).__name__).lower()


class OrderedLines:
    """Writes a line once all that belong before it are written, or, without `in_order`, at once. Slots count from 0."""

    def __init__(self, write: Callable[[bytes], object], in_order: bool = True) -> None:
        self._write = write
        self._in_order = in_order
        self._early: dict[int, bytes] = {}
        self._next = 0

    def put(self, slot: int, line: OutputLine) -> None:
        raw = msgspec.json.encode(line) + b"\n"
        if not self._in_order:
            self._write(raw)
            return
        self._early[slot] = raw
        while self._next in self._early:
            self._write(self._early.pop(self._next))
            self._next += 1

    def write_early(self) -> None:
        """What waits for others that will not come."""
        for slot in sorted(self._early):
            self._write(self._early.pop(slot))
