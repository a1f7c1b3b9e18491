"""The one waiting line: first come, first served, bounded, in front of all decode nodes."""

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from protocol.messages import Failure, FailureCode


class RequestFailed(RuntimeError):
    """The request has no result; the failure says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.code.value}: {failure.message}")
        self.failure = failure


class RequestQueue:
    """Lets as many requests through at once as `capacity()` says now. One event loop only."""

    def __init__(self, capacity: Callable[[], int], limit: int) -> None:
        self._capacity = capacity
        self._limit = limit
        self._line: deque[asyncio.Future[None]] = deque()
        self._inside = 0

    @property
    def waiting(self) -> int:
        return sum(1 for turn in self._line if not turn.done())

    @property
    def inside(self) -> int:
        return self._inside

    async def enter(self) -> None:
        """Returns when it is this request's turn; `leave` must follow. Raises RequestFailed at once where the line is
        full or nothing can serve."""
        if self._capacity() == 0:
            raise RequestFailed(Failure(FailureCode.NO_DECODE, "No node is ready to serve; try again shortly."))
        if not self._line and self._inside < self._capacity():
            self._inside += 1
            return
        if self.waiting >= self._limit:
            raise RequestFailed(Failure(FailureCode.OVERLOADED, f"{self._limit} requests are waiting already."))
        await self._stand_in_line()

    def leave(self) -> None:
        self._inside -= 1
        self.move_up()

    def move_up(self) -> None:
        """Call when capacity may have changed. Where nothing can serve any more, those waiting are told so."""
        capacity = self._capacity()
        while self._line and (capacity == 0 or self._inside < capacity):
            turn = self._line.popleft()
            if turn.done():
                continue
            if capacity == 0:
                turn.set_exception(RequestFailed(Failure(FailureCode.NO_DECODE, "The last ready node is gone.")))
            else:
                self._inside += 1
                turn.set_result(None)

    async def _stand_in_line(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave()  # our turn came in the very moment in which we gave up
            turn.cancel()
            raise


class Place:
    """One request's place inside; entering may wait. For `async with`."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue

    async def __aenter__(self) -> Self:
        await self._queue.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.leave()
