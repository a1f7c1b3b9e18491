"""What a request asks of the cluster, and what comes back while it runs."""

from dataclasses import dataclass

from protocol.ledger import Ledger
from protocol.messages import FinishReason
from protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """`key`: 128 random bits, the request's name on every node. `received_at`, `deadline`: monotonic seconds. `n`:
    choices wanted of the one prompt."""

    key: str
    public_id: str
    prompt: list[int]
    sampling: SamplingParams
    received_at: float
    deadline: float
    n: int = 1


@dataclass(slots=True)
class Times:
    """Monotonic seconds, on the router's clock. `sent`, `first_token`: of the last attempt, whatever the choice."""

    received: float
    sent: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Tokens:
    ids: list[int]
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceDone:
    """The node has no more tokens of this choice; others follow."""

    choice: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Restarted:
    """Forget the output so far: the request starts again on another node."""


@dataclass(frozen=True, slots=True)
class Ended:
    """`reason`: of the choice that ended last."""

    reason: FinishReason
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing came for a while; it goes on."""


RunEvent = Tokens | ChoiceDone | Restarted | Idle | Ended
