"""One request's way through the cluster: a place in line, a decode node, its tokens, its one outcome.

    waiting -> sent -> Tokens, ChoiceDone ... -> Ended            the node's last word
                    -> failure -> Restarted, sent elsewhere       once, while nothing was shown
                               -> Restarted, waiting              if all other nodes are full
                               -> Restarted, sent anywhere        if only prefill nodes have failed it, and others
                                                                  have come since
                               -> RequestFailed
Leaving the `async with` before the end aborts the request on its node.
"""

import asyncio
import logging
from types import TracebackType
from typing import Self

from protocol.ledger import Ledger
from protocol.logs import event
from protocol.messages import ChoiceEnded, Failure, FailureCode, FinishReason, RequestEnded, TokenDelta
from router.attempt import Attempt, FromAttempt
from router.dispatch import Dispatcher
from router.queueing import RequestFailed, Turn
from router.token_request import ChoiceDone, Ended, Idle, Restarted, RunEvent, Times, TokenRequest, Tokens
from router.tried import Tried

MAX_ATTEMPTS = 2
LAST_WORD_S = 2.0
"""How long a stopped request waits for its node's ledger, where one was asked for."""
RETRYABLE = frozenset(
    {
        FailureCode.NODE_LOST,
        FailureCode.OVERLOADED,
        FailureCode.DRAINING,
        FailureCode.STALE_PEER,
        FailureCode.TRANSFER_FAILED,
        FailureCode.INCOMPATIBLE,
        FailureCode.UNSUPPORTED,
        FailureCode.INTERNAL,
    }
)
"""Another decode node may do better."""
DEADLINE_PASSED = Failure(FailureCode.DEADLINE, "The request's deadline passed.")

log = logging.getLogger(__name__)


class Run:
    """`async with Run(dispatcher, request, idle_s) as run: async for event in run: ...`

    Says Idle after each `idle_s` in which nothing came. Exactly one outcome: the iteration ends with Ended, or raises
    RequestFailed, or is left early. `tokens_shown` is set by the reader once the client has seen any of the tokens: no
    second attempt from then on.
    """

    def __init__(self, dispatcher: Dispatcher, request: TokenRequest, idle_s: float) -> None:
        self.request = request
        self.times = Times(request.received_at)
        self.tokens_shown = False
        self._dispatcher = dispatcher
        self._attempt: Attempt | None = None
        self._idle_s = idle_s
        self._tried = Tried()
        self._turn: Turn | None = None
        self._lost: Failure | None = None
        """What ended the first attempt, while a second one waits in line."""
        self._ended = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_attempt()
        if self._turn is not None:
            self._dispatcher.queue.leave(self._turn)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RunEvent:
        """Raises RequestFailed."""
        if self._ended:
            raise StopAsyncIteration
        while self._attempt is None:
            if not await self._has_turn():
                return Idle()
            self._start_on_turn()
        said = await self._next()
        if said is None:
            return Idle()
        if isinstance(said, TokenDelta):
            self._note_tokens(said)
            return Tokens(said.tokens, said.choice)
        if isinstance(said, ChoiceEnded):
            return ChoiceDone(said.choice, said.reason)
        decode = self._leave_attempt()
        if isinstance(said, RequestEnded) and said.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._ended = True
            return Ended(said.reason, said.ledger)
        failure = _failure(said)
        self._tried.note(decode, failure, said.ledger.attempts if isinstance(said, RequestEnded) else 0)
        self._start_again(failure)
        return Restarted()

    def stop_choice(self, choice: int) -> None:
        """Enough tokens of this one: what may still come of it is to be ignored. The others go on."""
        if self._attempt is not None:
            self._dispatcher.stop_choice(self._attempt, choice)

    async def stop(self) -> Ledger | None:
        """Enough tokens: abort, and wait a little for the node's ledger."""
        attempt = self._attempt
        if attempt is None:
            return None
        if not attempt.over:
            self._dispatcher.abort(attempt.decode.instance, attempt.request)
        try:
            async with asyncio.timeout(LAST_WORD_S):
                while not isinstance(said := await attempt.inbox.get(), RequestEnded | Failure):
                    continue
        except TimeoutError:
            return None
        return said.ledger if isinstance(said, RequestEnded) else None

    def now(self) -> float:
        """On the clock of `times`."""
        return self._dispatcher.clock()

    def _check_deadline(self) -> float:
        """The seconds left. Raises RequestFailed once there are none."""
        left = self.request.deadline - self.now()
        if left <= 0:
            raise RequestFailed(DEADLINE_PASSED)
        return left

    def _patience_s(self) -> float:
        return min(self._check_deadline(), self._idle_s)

    async def _has_turn(self) -> bool:
        """False if it is still waiting after the idle time."""
        if self._turn is None:
            self._turn = self._dispatcher.queue.join()
        if not self._turn.done():
            await asyncio.wait({self._turn}, timeout=self._patience_s())
        if not self._turn.done():
            self._check_deadline()
            return False
        try:
            self._turn.result()
        except RequestFailed as failed:
            raise RequestFailed(self._lost or failed.failure) from None
        return True

    def _start(self) -> None:
        self.times.first_token = 0.0
        self.times.sent = self.now()  # before the message leaves: the node's own time lies within ours
        self._attempt = self._dispatcher.start(self.request, self._tried)

    def _start_on_turn(self) -> None:
        """Or stays without an attempt, where others took the room. Raises RequestFailed."""
        try:
            self._start()
        except RequestFailed:
            if self._lost is None:
                raise
            self._line_up_again(self._lost)

    async def _next(self) -> FromAttempt | None:
        """None if nothing came in the idle time."""
        assert self._attempt is not None
        inbox = self._attempt.inbox
        if not inbox.empty():
            return inbox.get_nowait()
        try:
            async with asyncio.timeout(self._patience_s()):
                return await inbox.get()
        except TimeoutError:
            self._check_deadline()
            return None

    def _note_tokens(self, said: TokenDelta) -> None:
        assert self._attempt is not None
        self.times.last_token = self.now()
        self._dispatcher.metrics.tokens.inc(len(said.tokens))
        if not self.times.first_token:
            self.times.first_token = self.times.last_token
            self._dispatcher.prompt_done(self._attempt)

    def _start_again(self, failure: Failure) -> None:
        """Elsewhere at once, or back in line where every other node is full. Raises RequestFailed."""
        if not self._may_start_again(failure):
            raise RequestFailed(failure)
        try:
            self._start()
        except RequestFailed:
            self._line_up_again(failure)
        self._dispatcher.metrics.retries.inc()
        event(log, "request retried", logging.WARNING, request=self.request.key, after=failure.message)

    def _may_start_again(self, failure: Failure) -> bool:
        if self.tokens_shown:
            return False
        if failure.code is FailureCode.NO_PREFILL:
            return self._dispatcher.has_other_prefills(self._tried)
        return failure.code in RETRYABLE and len(self._tried.decodes) < MAX_ATTEMPTS

    def _line_up_again(self, failure: Failure) -> None:
        """Give the turn to others, until a node that has not failed it has room. Raises RequestFailed, with what ended
        the last attempt, where none will have any."""
        assert self._turn is not None
        turn, self._turn, self._lost = self._turn, None, failure
        self._dispatcher.queue.leave(turn)
        try:
            if self._dispatcher.has_room(self._tried):  # and yet it could not be sent
                raise RequestFailed(failure)
            self._turn = self._dispatcher.queue.join(lambda: self._dispatcher.has_room(self._tried))
        except RequestFailed:
            raise RequestFailed(failure) from None

    def _leave_attempt(self) -> str:
        """The decode node that it was on, if any."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return ""
        self._dispatcher.finish(attempt)
        return attempt.decode.instance


def _failure(said: RequestEnded | Failure) -> Failure:
    if isinstance(said, Failure):
        return said
    if said.reason is FinishReason.CANCELLED:  # not by us: we had left
        return Failure(FailureCode.NODE_LOST, "The node that served the request gave it up.")
    return said.failure or Failure(FailureCode.INTERNAL, "The node reported an error without saying which.")
