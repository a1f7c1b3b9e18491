"""What a user asks of the offline face, and what he gets: records that never change."""

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from engine.request import Request, RequestStatus
from protocol.messages import FinishReason
from protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`request_id`: None for one that the manager makes up. `n`: sequences wanted; the further ones are requests of
    their own, named `<id>__child#<i>`. `priority`: lower ones are admitted first. `cache_salt`: only requests of the
    same salt share cached blocks. `streaming`: an output per token instead of one at the end. `record_timestamps`:
    tell when each token came."""

    prompt_ids: list[int]
    sampling: SamplingParams
    _: KW_ONLY
    request_id: str | None = None
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    streaming: bool = False
    record_timestamps: bool = False

    def as_request(self, request_id: str) -> Request:
        """What the engine gets."""
        return Request(
            request_id,
            self.prompt_ids,
            self.sampling,
            priority=self.priority,
            n=self.n,
            cache_salt=self.cache_salt,
        )


class Lifespan(NamedTuple):
    """When it was first scheduled, and when it became terminal; None for what did not happen (yet)."""

    started: float | None
    ended: float | None


class GenerationOutput(NamedTuple):
    """One request as it was at one moment: a tuple, since a stream makes one for every token. All times are in seconds
    of `time.monotonic`.

    `generated_ids`: all so far, an end token included. `logprobs`: one per generated token, None unless asked for.
    `status`: FINISHED, FAILED or CANCELLED in the one terminal output, DECODING in those of a stream before it.
    `finish_reason`: of the terminal one. `error`: of a FAILED one. `timestamps`: one per generated token, None unless
    asked for. `sequence_index`: its number among those of its prompt: 0 for the request's own, i for
    `<id>__child#<i>`.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    generated_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    status: RequestStatus
    finish_reason: FinishReason | None
    error: str | None
    created_time: float
    lifespan: Lifespan
    timestamps: tuple[float, ...] | None
    sequence_index: int

    @property
    def is_terminal(self) -> bool:
        return self.status >= RequestStatus.FINISHED
