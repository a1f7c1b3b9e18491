"""What one step reports, and what a listener is told around a forward."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.prefix_cache import CacheEvent
from protocol.messages import Failure, FinishReason


@dataclass(slots=True)  # not frozen: one is made for every token, and freezing triples its cost
class NewToken:
    """`index`: position within the request's output, from 0. `logprob`: if the request asked for it."""

    request_id: str
    index: int
    token: int
    logprob: float | None = None


@dataclass(frozen=True)
class Ended:
    """The one terminal word on a request. `failure` with reason ERROR only; `generated` counts its tokens."""

    request_id: str
    reason: FinishReason
    failure: Failure | None
    generated: int


@dataclass
class StepOutput:
    """`started`: requests that left the waiting line for the first time. `prefilled`: prefill-only requests whose last
    chunk ran; their blocks stay held until `Engine.release`. `cache_events`: prefixes that can be hit from now on, or
    no longer."""

    tokens: list[NewToken] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    prefilled: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    cache_events: list[CacheEvent] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether somebody waits for it: the rest is only worth knowing."""
        return bool(self.tokens or self.ended or self.prefilled)


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens [start, end) of a prefill-only request, announced before their forward.

    `tables`: the request's whole block tables, by group. `first_threshold`: the progress word's value once layer 0 of
    this forward is done; layer l is done at `first_threshold + l`. Tokens before `start` are in KV already: where a
    prefix was cached, the first chunk does not start at 0, and if all of it was, it is empty. `context_slot`: where the
    prompt's context is once the forward of its last chunk has ended, on engines that compute one.
    """

    request_id: str
    start: int
    end: int
    tables: tuple[tuple[int, ...], ...]
    first_threshold: int
    context_slot: int | None = None


class EngineListener(Protocol):
    """Told about forwards that hold prefill-only chunks, and about no others. Called on the engine's thread.

    Each `before_forward` is followed by exactly one of the other two. `forward_failed` comes before any later forward
    can move the progress word: what was armed on it must be disarmed before returning.
    """

    def before_forward(self, chunks: Sequence[PrefillChunk]) -> None: ...

    def forward_ended(self, chunks: Sequence[PrefillChunk], started_ns: int, ended_ns: int) -> None:
        """Times are of CLOCK_MONOTONIC."""

    def forward_failed(self, chunks: Sequence[PrefillChunk], error: str) -> None: ...
