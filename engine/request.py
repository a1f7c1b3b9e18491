"""A request as the engine keeps it: its tokens and a few counters. Everything else is derived."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from engine.contexts import Context
from engine.forward_batch import SampleStream
from protocol.sampling import SamplingParams


class RequestStatus(IntEnum):
    """Ordered: from FINISHED on a request is terminal.

    PENDING -> PREFILLING -> DECODING -> FINISHED; an offload or a soft reset goes back to PENDING.
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


@dataclass(eq=False, slots=True)
class Request:
    """`prompt`: token ids. `attempt` tells lives of one id apart while pages of an earlier one are in quarantine.
    `priority`: lower ones are admitted first. `n`: sequences wanted; further ones are forked off once the prompt but
    for its last token is computed, as requests named `<id>__child#<i>`. `cache_salt`: only requests of the same salt
    share cached blocks.

    `tokens` is the prompt and all generated so far; `computed` of them are in KV, or will be when the forwards under
    way end (counted when a batch is assembled). `unknown`: tokens that forwards under way are sampling.
    """

    id: str
    prompt: list[int]
    sampling: SamplingParams
    prefill_only: bool = False
    attempt: int = 1
    priority: int = 0
    n: int = 1
    cache_salt: str = ""
    status: RequestStatus = field(default=RequestStatus.PENDING, init=False)
    owner: Owner = field(init=False)
    tokens: list[int] = field(init=False)
    token_limit: int = field(default=1 << 62, init=False)
    """Tokens at which it is complete at the latest; set at admission. Running out of the model's positions counts."""
    end_tokens: frozenset[int] = field(default=frozenset(), init=False)
    """Tokens that complete it; set at admission."""
    computed: int = field(default=0, init=False)
    capacity: int = field(default=0, init=False)
    """Tokens that its blocks hold, as far as the scheduler has noticed: no need to ask for more until then."""
    tables: list[list[int]] = field(default_factory=list, init=False)
    """Its live block tables, one per layer group, once it was scheduled."""
    unknown: int = field(default=0, init=False)
    in_flight: int = field(default=0, init=False)
    """Forwards under way that it is part of."""
    sample_index: int = field(default=-1, init=False)
    """Where in the last launched forward's samples its token is."""
    samples: SampleStream = field(init=False)
    """What its tokens are drawn from; seeded at admission."""
    overtakes: int = field(default=0, init=False)
    started: bool = field(default=False, init=False)
    """It has been active."""
    offloaded: bool = field(default=False, init=False)
    """Its KV is in host memory."""
    unborn: list[str] = field(default_factory=list, init=False)
    """Ids of the children that are still to be forked off."""
    block_hashes: list[bytes] = field(default_factory=list, init=False)
    """Of its full blocks, as far as they were needed."""
    context: Context | None = field(default=None, init=False)
    """Once it is there, where its engine keeps contexts. A prefill-only request's is in its slot instead."""

    def __post_init__(self) -> None:
        self.owner = Owner(self.id, self.attempt)
        self.prompt = list(self.prompt)
        self.tokens = list(self.prompt)
        self.seed(0)

    def seed(self, seed: int) -> None:
        self.samples = SampleStream(self.sampling, seed, self.tokens, len(self.prompt))

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that are not in KV yet: 1 while decoding."""
        return len(self.tokens) + self.unknown - self.computed

    @property
    def context_position(self) -> int:
        """Of the token before the prompt's last, which a prefill-only prompt comes without; -1 if there is none."""
        return len(self.prompt) - (1 if self.prefill_only else 2)

    @property
    def is_terminal(self) -> bool:
        return self.status >= RequestStatus.FINISHED

    def child_ids(self) -> list[str]:
        return [f"{self.id}__child#{i}" for i in range(1, self.n)]

    def soft_reset(self) -> None:
        """Start over, keeping what was generated: it becomes part of what is prefilled."""
        self.computed = 0
        self.status = RequestStatus.PENDING
