"""A peer that computes nothing, to run as a process: settings' `gguf` says how it is to misbehave."""

import os
from collections.abc import Sequence

from bench.peers.lines import Arrival, Prompt, Served, Settings, Timed, serve

DIES_AT_START = "dies at start"
FAILS = "fails"
DIES = "dies"


class FakePeer:
    def __init__(self, settings: Settings) -> None:
        self._way = settings.gguf
        if self._way == DIES_AT_START:
            raise SystemExit("no such model")

    def fill(self, prompts: Sequence[Prompt]) -> None:
        print(f"a library says something about {len(prompts)} prompts")  # noqa: T201 - that is what libraries do

    def decode(self, prompts: Sequence[Prompt], steps: int) -> Timed:
        if self._way == FAILS:
            raise ValueError("it cannot do that")
        if self._way == DIES:
            os._exit(3)
        return Timed(0.5, len(prompts) * steps)

    def prefill(self, prompt: Prompt) -> Timed:
        return Timed(0.25, len(prompt))

    def replay(self, arrivals: Sequence[Arrival]) -> list[Served]:
        return [Served(one.at, one.at + 1.0, one.at + 2.0, one.new) for one in arrivals]

    def close(self) -> None: ...


if __name__ == "__main__":
    serve(FakePeer)
