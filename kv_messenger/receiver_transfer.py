"""The decode side of one transfer attempt, as a pure state machine.

Two questions are kept apart: the *outcome* (did the KV arrive?), decided exactly once, and the *account* (may the peer
still write into the pages?), closed exactly once, never by time:

    outcome   open ----> ARRIVED | FAILED | CANCELLED
    account   OPEN ----> CLOSED       every write counted, or the posted ones counted after Stopped, or a fence

    OPEN, sender at work --Stopped(n), n > counted--> OPEN, settling towards n --counted n--> CLOSED
                                                            `--deadline--> NeedFence ----fenced---> CLOSED
"""

from dataclasses import dataclass
from enum import Enum

from protocol.messages import Failure, FailureCode
from protocol.ticket import TransferKey

STOP_DEADLINE_S = 3.0
"""How long a live sender may take to answer AbortTransfer before it is fenced."""
SETTLE_DEADLINE_S = 2.0
"""How long posted writes may be on their way after the sender stopped, before it is fenced."""


class Outcome(Enum):
    ARRIVED = "arrived"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Decided:
    """The outcome, once. `failure` with FAILED only."""

    outcome: Outcome
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class AccountClosed:
    """No peer can write into the pages any more: they may be freed, and the immediate given back."""


@dataclass(frozen=True, slots=True)
class AskToStop:
    """Send AbortTransfer."""


@dataclass(frozen=True, slots=True)
class Revise:
    """Expect `count` writes from now on."""

    count: int


@dataclass(frozen=True, slots=True)
class NeedFence:
    """Only a fence can close the account."""

    reason: str


Action = Decided | AccountClosed | AskToStop | Revise | NeedFence


@dataclass(slots=True)
class ReceiverTransfer:
    """`deadline`: monotonic seconds. `verified`: arrival alone is not enough, the sender's checksums must be compared
    first (debug mode). `expected`: writes that make it whole, 0 until the ticket is sent."""

    key: TransferKey
    deadline: float
    verified: bool = False
    expected: int = 0
    decided: Decided | None = None
    closed: bool = False
    arrived: bool = False
    checksums: bytes | None = None
    finished: bool = False
    final_posted: int | None = None
    fence_due: float | None = None
    """When NeedFence is raised: set while we wait for Stopped or for posted writes to land."""
    fence_reason: str = ""

    def on_arrived(self, count: int) -> list[Action]:
        """The fabric counted exactly the number last asked for."""
        if self.closed:
            return []
        if self.final_posted is not None and count == self.final_posted != self.expected:
            return self._close()
        if count != self.expected:
            return []
        self.arrived = True
        return self._end_if_whole()

    def on_finished(self, now: float, posted: int, checksums: bytes | None) -> list[Action]:
        """The sender has seen all its writes complete."""
        if self.final_posted is not None:
            return []
        self.finished, self.checksums, self.final_posted = True, checksums, posted
        if posted != self.expected:
            failure = Failure(FailureCode.TRANSFER_FAILED, f"sender posted {posted} writes, expected {self.expected}")
            return self._decide(Outcome.FAILED, failure) + self._settle(now, posted)
        if self.arrived:
            return self._end_if_whole()
        self._fence_at(now + SETTLE_DEADLINE_S, f"{posted} writes finished but not all counted")
        return []

    def on_stopped(self, now: float, posted: int, failure: Failure | None) -> list[Action]:
        """Nothing more will be posted; `posted` of them may still be on their way."""
        if self.final_posted is not None:
            return []
        self.final_posted = posted
        why = failure or Failure(FailureCode.TRANSFER_FAILED, "the sender stopped")
        return self._decide(Outcome.FAILED, why) + self._settle(now, posted)

    def on_refused(self, failure: Failure) -> list[Action]:
        """Nothing was written for this key."""
        return self._decide(Outcome.FAILED, failure) + self._close()

    def on_never_sent(self) -> list[Action]:
        """The ticket was withdrawn before it left: nobody can write. Called where an AskToStop needs no asking."""
        return self._close()

    def on_over_counted(self, count: int) -> list[Action]:
        failure = Failure(FailureCode.TRANSFER_FAILED, f"{count} writes counted, expected {self.expected}")
        return [*self._decide(Outcome.FAILED, failure), NeedFence("more writes than expected")]

    def on_peer_lost(self, failure: Failure) -> list[Action]:
        """The sender is unreachable: give up on it. The owner fences; the account stays open until then."""
        return self._decide(Outcome.FAILED, failure)

    def on_fenced(self, failure: Failure) -> list[Action]:
        """Nothing of this peer can land any more."""
        return self._decide(Outcome.FAILED, failure) + self._close()

    def abort(self, now: float, failure: Failure | None) -> list[Action]:
        """Our own side gives up: cancelled (`failure` None) or failed."""
        if self.closed:
            return self._decide(Outcome.CANCELLED if failure is None else Outcome.FAILED, failure)
        if self.decided is not None:
            return []
        decided = self._decide(Outcome.CANCELLED if failure is None else Outcome.FAILED, failure)
        if self.final_posted is None:
            self._fence_at(now + STOP_DEADLINE_S, "the sender does not answer AbortTransfer")
            return [*decided, AskToStop()]
        return decided

    def on_tick(self, now: float) -> list[Action]:
        if self.fence_due is not None and now >= self.fence_due:
            self.fence_due = None
            failure = Failure(FailureCode.TRANSFER_FAILED, self.fence_reason)
            return [*self._decide(Outcome.FAILED, failure), NeedFence(self.fence_reason)]
        if self.decided is None and now >= self.deadline:
            return self.abort(now, Failure(FailureCode.DEADLINE, "the KV did not arrive before the deadline"))
        return []

    def _end_if_whole(self) -> list[Action]:
        """Verified: only with the sender's last word, for its pages must not go to others before they were compared."""
        if self.verified and self.final_posted is None:
            return []
        return self._decide(Outcome.ARRIVED, None) + self._close()

    def _decide(self, outcome: Outcome, failure: Failure | None) -> list[Action]:
        if self.decided is not None:
            return []
        self.decided = Decided(outcome, failure)
        return [self.decided]

    def _close(self) -> list[Action]:
        if self.closed:
            return []
        self.closed = True
        self.fence_due = None
        return [AccountClosed()]

    def _settle(self, now: float, posted: int) -> list[Action]:
        if self.closed:
            return []
        self._fence_at(now + SETTLE_DEADLINE_S, f"{posted} writes posted but not all counted")
        return [Revise(posted)]

    def _fence_at(self, due: float, reason: str) -> None:
        self.fence_due, self.fence_reason = due, reason
