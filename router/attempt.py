"""One try of one request on one decode node, and what has come back from it."""

import asyncio
from dataclasses import dataclass, field

from protocol.messages import Failure, FailureCode, RequestEnded, TokenDelta
from router.membership import Member

FromAttempt = TokenDelta | RequestEnded | Failure
"""A Failure: this try is over without the node's last word."""


@dataclass(slots=True, eq=False)
class Attempt:
    """`inbox` holds at most the tokens that the request may generate. `over`: nothing more will come. The members are
    those that it was counted on: one that was lost and came back under the same instance is another."""

    request: str
    decode: Member
    first_prefill: Member | None
    inbox: asyncio.Queue[FromAttempt] = field(default_factory=asyncio.Queue)
    tokens: int = 0
    over: bool = False

    def take(self, message: TokenDelta | RequestEnded) -> None:
        """Tokens count only in order and without a gap: on any doubt the try has failed."""
        if self.over:
            return
        if isinstance(message, RequestEnded):
            self.over = True
        elif message.index != self.tokens:
            self.fail(Failure(FailureCode.INTERNAL, f"token {self.tokens} expected, got {message.index}"))
            return
        else:
            self.tokens += len(message.tokens)
        self.inbox.put_nowait(message)

    def fail(self, failure: Failure) -> None:
        if not self.over:
            self.over = True
            self.inbox.put_nowait(failure)
