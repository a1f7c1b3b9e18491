"""The one waiting line: first come, first served, bounded, in front of all decode nodes."""

import asyncio
from collections.abc import Callable

from protocol.messages import Failure, FailureCode

Turn = asyncio.Future[None]
"""Done: it is this request's turn. Fails with RequestFailed where nothing can serve any more."""

Room = Callable[[], bool]
"""Whether one that waits could be sent now. Raises RequestFailed where it never can."""

NOBODY = Failure(
    FailureCode.NO_DECODE, "No decode node is ready that has a compatible prefill node; try again shortly."
)


class RequestFailed(RuntimeError):
    """The request has no result; the failure says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.code.value}: {failure.message}")
        self.failure = failure


class RequestQueue:
    """Lets as many requests through at once as `capacity()` says now; where that is 0, `why_none()` says why. One event
    loop only."""

    def __init__(
        self, capacity: Callable[[], int], limit: int, why_none: Callable[[], Failure] = lambda: NOBODY
    ) -> None:
        self._capacity = capacity
        self._why_none = why_none
        self._limit = limit
        self._line: dict[Turn, Room] = {}
        self._inside = 0

    @property
    def waiting(self) -> int:
        return len(self._line)

    def check_room(self) -> None:
        """Raises RequestFailed where a newcomer would be refused because so many wait already."""
        if len(self._line) >= self._limit and self._inside >= self._capacity() > 0:
            raise RequestFailed(Failure(FailureCode.OVERLOADED, f"{self._limit} requests are waiting already."))

    def join(self, has_room: Room = lambda: True) -> Turn:
        """Wait for the turn; `leave` must follow in any case. `has_room`: of one that not every node can serve; others
        pass it while it is False. Raises RequestFailed at once where the line is full or nothing can serve."""
        if self._capacity() == 0:
            raise RequestFailed(self._why_none())
        self.check_room()
        turn: Turn = asyncio.get_running_loop().create_future()
        self._line[turn] = has_room
        self.move_up()
        return turn

    def leave(self, turn: Turn) -> None:
        """The request ended, or gave up waiting."""
        if not turn.done():
            turn.cancel()
            del self._line[turn]
        elif turn.exception() is None:
            self._inside -= 1
            self.move_up()

    def move_up(self) -> None:
        """Call when capacity may have changed. Where nothing can serve any more, those waiting are told so."""
        capacity = self._capacity()
        if capacity == 0:
            self.dismiss(Failure(FailureCode.NO_DECODE, "The last ready node is gone."))
        for turn, has_room in list(self._line.items()):
            if self._inside >= capacity:
                return
            self._admit(turn, has_room)

    def _admit(self, turn: Turn, has_room: Room) -> None:
        try:
            if not has_room():
                return
            self._inside += 1
            turn.set_result(None)
        except RequestFailed as never:
            turn.set_exception(never)
        del self._line[turn]

    def dismiss(self, failure: Failure) -> None:
        """Nobody in line will get a turn."""
        line, self._line = self._line, {}
        for turn in line:
            turn.set_exception(RequestFailed(failure))
