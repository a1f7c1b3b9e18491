"""The benchmark's side of a peer: its process, one order at a time."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.peers.lines import Arrival, Prompt, Served, Settings, Timed
from bench.peers.orders import Child, ChildFailed

LOAD_S = 300.0
ANSWER_S = 1800.0


class PeerProcess:
    """Satisfies Peer. Raises ChildFailed from every call; go on without it then. `log`: gets what the peer and its
    libraries print. `variables`: of its environment, beside the benchmark's own."""

    def __init__(
        self,
        module: str,
        python: Path,
        log: Path,
        settings: Settings,
        cores: Sequence[int],
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        threads = {name: str(settings.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        variables = {**variables, "TOKENIZERS_PARALLELISM": "false", **threads}
        self._child = Child(module, [json.dumps(asdict(settings))], python, variables, log)
        os.sched_setaffinity(self._child.pid, cores)

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
        self._child.close()

    def _ask(self, do: str, **arguments: Any) -> Any:
        self._child.tell(do=do, **arguments)
        return self._answer(ANSWER_S).get("result")

    def _answer(self, seconds: float) -> dict[str, Any]:
        answer = self._child.answer(seconds)
        if "error" in answer:
            raise ChildFailed(answer["error"])
        return answer
