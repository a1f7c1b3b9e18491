"""A request as the engine keeps it: its tokens and three counters. Everything else is derived."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from protocol.sampling import SamplingParams


class RequestStatus(IntEnum):
    """Ordered: from FINISHED on a request is terminal.

    PENDING -> PREFILLING -> DECODING -> FINISHED; a soft reset goes back to PENDING.
    WAITING_FOR_REMOTE_KV -> DECODING, or out of the engine with its pages in quarantine.
    """

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    WAITING_FOR_REMOTE_KV = 3
    FINISHED = 4
    FAILED = 5
    CANCELLED = 6


class Owner(NamedTuple):
    """Who holds blocks: a request and its attempt (the ledger's generation)."""

    request_id: str
    attempt: int


@dataclass(eq=False)
class Request:
    """`prompt`: token ids. `attempt` tells lives of one id apart while pages of an earlier one are in quarantine.

    `tokens` is the prompt and all generated so far; `computed` of them are in KV (counted when a batch is assembled).
    """

    id: str
    prompt: list[int]
    sampling: SamplingParams
    prefill_only: bool = False
    attempt: int = 1
    status: RequestStatus = field(default=RequestStatus.PENDING, init=False)
    owner: Owner = field(init=False)
    tokens: list[int] = field(init=False)
    computed: int = field(default=0, init=False)
    seed: int = field(default=0, init=False)
    overtakes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.owner = Owner(self.id, self.attempt)
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that are not in KV yet: 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def is_terminal(self) -> bool:
        return self.status >= RequestStatus.FINISHED

    def soft_reset(self) -> None:
        """Start over, keeping what was generated: it becomes part of what is prefilled."""
        self.computed = 0
        self.status = RequestStatus.PENDING
