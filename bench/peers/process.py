"""The benchmark's side of a peer: its process, one order at a time."""

import json
import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.peers.lines import Arrival, Prompt, Served, Settings, Timed

ROOT = Path(__file__).resolve().parents[2]
LOAD_S = 300.0
ANSWER_S = 1800.0
END_S = 20.0


class PeerFailed(RuntimeError):
    """The peer died, fell silent or answered with an error; go on without it."""


class PeerProcess:
    """Satisfies Peer. Raises PeerFailed from every call. `log`: gets what the peer and its libraries print.
    `variables`: of its environment, beside the benchmark's own."""

    def __init__(
        self,
        module: str,
        python: Path,
        log: Path,
        settings: Settings,
        cores: Sequence[int],
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._log = log
        variables = dict(variables) | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
        variables |= {name: str(settings.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [python, "-m", module, json.dumps(asdict(settings))],
                cwd=ROOT,
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )
        os.sched_setaffinity(self._process.pid, cores)

    def wait_ready(self) -> None:
        self._answer(LOAD_S)

    def fill(self, prompts: Sequence[Prompt]) -> None:
        self._ask("fill", prompts=prompts)

    def decode(self, prompts: Sequence[Prompt], steps: int) -> Timed:
        return Timed(**self._ask("decode", prompts=prompts, steps=steps))

    def prefill(self, prompt: Prompt) -> Timed:
        return Timed(**self._ask("prefill", prompt=prompt))

    def replay(self, arrivals: Sequence[Arrival]) -> list[Served]:
        answer = self._ask("replay", arrivals=[asdict(arrival) for arrival in arrivals])
        return [Served(**served) for served in answer]

    def close(self) -> None:
        """The end of its input ends a peer; one that does not hear it is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, do: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        order = json.dumps({"do": do, **arguments}) + "\n"
        try:
            self._process.stdin.write(order.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(self._last_words()) from None
        return self._answer(ANSWER_S).get("result")

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        heard, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not heard:
            raise PeerFailed(f"no answer within {seconds:.0f} s (see {self._log})")
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer

    def _last_words(self) -> str:
        code = self._process.wait(END_S)
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"ended with {code}: {lines[-1] if lines else 'silently'}"
