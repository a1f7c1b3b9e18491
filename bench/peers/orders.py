"""One order at a time: a JSON object a line down a process's standard input, its answer up.

The two sides of it: `obey_orders` in the process, and `Child` in whoever started it. What libraries print there goes to
standard error: answers alone use the descriptor that was standard output.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 300.0
END_S = 20.0

Answer = dict[str, Any]


class ChildFailed(RuntimeError):
    """It died, fell silent or answered with an error; the message has its last words."""


class Obeys(Protocol):
    def obey(self, order: Answer) -> Answer: ...

    def close(self) -> None: ...


def obey_orders(build: Callable[[], Obeys]) -> None:
    """Until the input ends. `build` is called once what is printed goes elsewhere."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    built = build()
    try:
        for line in sys.stdin:
            answers.write(json.dumps(built.obey(json.loads(line))) + "\n")
            answers.flush()
    finally:
        built.close()


class Child:
    """`python -m MODULE ARGUMENTS`. `log`: gets what it and its libraries print; None: it goes where ours goes. Every
    call raises ChildFailed."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        python: Path = Path(sys.executable),
        variables: Mapping[str, str] = MappingProxyType({}),
        log: Path | None = None,
    ) -> None:
        self._log = log
        with open(log or os.devnull, "w") as output:
            self._process = subprocess.Popen(
                [python, "-m", module, *arguments],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(variables),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output if log else None,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **order: object) -> Answer:
        self.tell(**order)
        return self.answer()

    def tell(self, **order: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildFailed(self._last_words()) from None

    def answer(self, seconds: float = ANSWER_S) -> Answer:
        """To the last order."""
        assert self._process.stdout is not None
        heard, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not heard:
            raise ChildFailed(f"no answer within {seconds:.0f} s (see {self._log})")
        line = self._process.stdout.readline()
        if not line:
            raise ChildFailed(self._last_words())
        answer: Answer = json.loads(line)
        return answer

    def pause(self) -> None:
        """Stop it where it is, so that its threads cost nothing while others are measured."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """The end of its input ends it; if it does not hear that it is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self.go_on()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _last_words(self) -> str:
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return f"closed its pipes and does not end (see {self._log})"
        said = self._log.read_text(errors="replace") if self._log else ""
        lines = [line for line in said.splitlines() if line.strip()]
        return f"ended with {code}: {lines[-1] if lines else 'silently'}"
