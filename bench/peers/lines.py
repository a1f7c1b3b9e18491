"""What the benchmark and a peer say to each other: one JSON object a line, an order down, its answer up."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a peer is built for. `model`: a folder of float32 safetensors; `gguf`: the file that it was made from.
    `cache_tokens`: room for KV, of all requests together; `max_context`: tokens of the longest request."""

    model: str
    gguf: str
    threads: int
    max_requests: int
    cache_tokens: int
    max_context: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of the mixed load: it arrives `at` seconds after the load's start, whatever the engine does then."""

    at: float
    prompt: Prompt
    new: int


@dataclass(frozen=True, slots=True)
class Timed:
    """`tokens` came, or were computed, in `seconds`."""

    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Served:
    """When the first and the last of a request's `tokens` came, in seconds after the load's start."""

    at: float
    first: float
    last: float
    tokens: int


class Peer(Protocol):
    """One engine, loaded and warm."""

    def fill(self, prompts: Sequence[Prompt]) -> None:
        """Compute the KV of `prompts` and keep it where the engine keeps what may be used again."""

    def decode(self, prompts: Sequence[Prompt], steps: int) -> Timed:
        """Continue filled prompts (or beginnings of them) together; the clock runs while all of them decode."""

    def prefill(self, prompt: Prompt) -> Timed:
        """Until the first token of a prompt never seen before."""

    def replay(self, arrivals: Sequence[Arrival]) -> list[Served]:
        """The mixed load, open loop; answers in the order of `arrivals`."""

    def close(self) -> None: ...


def serve(build: Callable[[Settings], Peer]) -> None:
    """A peer's main: build it from the settings in argv, answer orders until the input ends.

    What libraries print goes to standard error: the answers alone use the descriptor that was standard output.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    peer = build(Settings(**json.loads(sys.argv[1])))
    say(ready=True)
    try:
        for line in sys.stdin:
            order = json.loads(line)
            try:
                say(result=_obey(peer, **order))
            except Exception as error:  # noqa: BLE001  the benchmark reports it and goes on without this peer
                traceback.print_exc()
                say(error=f"{type(error).__name__}: {error}")
    finally:
        peer.close()


def _obey(peer: Peer, do: str, **arguments: Any) -> Any:
    if do == "fill":
        return peer.fill(**arguments)
    if do == "decode":
        return asdict(peer.decode(**arguments))
    if do == "prefill":
        return asdict(peer.prefill(**arguments))
    arrivals = [Arrival(**arrival) for arrival in arguments["arrivals"]]
    return [asdict(served) for served in peer.replay(arrivals)]
