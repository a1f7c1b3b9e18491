"""Outputs that wait to be taken: of a stream that nobody reads, each costs a few words, however long it is."""

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.generation_output import GenerationOutput, Lifespan
from engine.request import RequestStatus
from protocol.messages import FinishReason


@dataclass(slots=True)
class Generated:
    """What one sequence has come to: lists that only grow. `created`, `timestamps`: in seconds."""

    request_id: str
    index: int
    prompt: tuple[int, ...]
    created: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    timestamps: list[float] | None = None


class Snapshot(NamedTuple):
    """`generated` as it was at `length` tokens."""

    generated: Generated
    length: int
    status: RequestStatus
    finish_reason: FinishReason | None
    error: str | None
    lifespan: Lifespan

    @property
    def request_id(self) -> str:
        return self.generated.request_id

    @property
    def is_terminal(self) -> bool:
        return self.status >= RequestStatus.FINISHED

    def output(self) -> GenerationOutput:
        its = self.generated
        return GenerationOutput(
            request_id=its.request_id,
            prompt_ids=its.prompt,
            generated_ids=tuple(its.tokens[: self.length]),
            logprobs=None if its.logprobs is None else tuple(its.logprobs[: self.length]),
            status=self.status,
            finish_reason=self.finish_reason,
            error=self.error,
            created_time=its.created,
            lifespan=self.lifespan,
            timestamps=None if its.timestamps is None else tuple(its.timestamps[: self.length]),
            sequence_index=its.index,
        )
