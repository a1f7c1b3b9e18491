"""One try of one request on one decode node, and what has come back from it."""

import asyncio
from dataclasses import dataclass, field

from protocol.messages import ChoiceEnded, Failure, FailureCode, FinishReason, RequestEnded, TokenDelta
from router.membership import Member

FromNode = TokenDelta | ChoiceEnded | RequestEnded
FromAttempt = FromNode | Failure
"""A Failure: this try is over without the node's last word."""


@dataclass(slots=True, eq=False)
class Attempt:
    """`inbox` holds at most the tokens that the request may generate. `over`: nothing more will come. The members are
    those that it was counted on: one that was lost and came back under the same instance is another. `tokens`: how many
    came of each choice that the node has not ended. `received`: of all. `stopped`: choices of which we want no more."""

    request: str
    decode: Member
    first_prefill: Member | None
    tokens: dict[int, int]
    inbox: asyncio.Queue[FromAttempt] = field(default_factory=asyncio.Queue)
    stopped: set[int] = field(default_factory=set)
    received: int = 0
    over: bool = False

    def take(self, message: FromNode) -> None:
        """Tokens count only in order and without a gap, and every choice ends once: on any doubt the try has failed."""
        if self.over:
            return
        if doubt := self._doubt(message):
            self.fail(Failure(FailureCode.INTERNAL, doubt))
            return
        self._note(message)
        self.inbox.put_nowait(message)

    def fail(self, failure: Failure) -> None:
        if not self.over:
            self.over = True
            self.inbox.put_nowait(failure)

    def _doubt(self, message: FromNode) -> str | None:
        """Why this cannot be the node's next word, or None."""
        if isinstance(message, RequestEnded):
            return self._doubt_end(message)
        if message.choice not in self.tokens:
            return f"choice {message.choice} has ended or was not asked for"
        if isinstance(message, TokenDelta):
            expected = self.tokens[message.choice]
            return None if message.index == expected else f"token {expected} expected, got {message.index}"
        cancelled = message.reason is FinishReason.CANCELLED and message.choice not in self.stopped
        return f"choice {message.choice} ended of itself" if cancelled or message.reason is FinishReason.ERROR else None

    def _doubt_end(self, message: RequestEnded) -> str | None:
        if message.reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            return None
        if len(self.tokens) != 1:
            return f"it ended before {len(self.tokens)} of its choices did"
        return None if message.tokens == self.received else f"{self.received} of {message.tokens} tokens came"

    def _note(self, message: FromNode) -> None:
        if isinstance(message, TokenDelta):
            self.tokens[message.choice] += len(message.tokens)
            self.received += len(message.tokens)
        elif isinstance(message, ChoiceEnded):
            del self.tokens[message.choice]
        else:
            self.over = True
