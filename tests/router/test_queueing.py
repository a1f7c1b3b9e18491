"""The line by itself: order, bounds, and leaving it at any moment."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from protocol.messages import Failure, FailureCode
from router.queueing import RequestFailed, RequestQueue, Turn

DEADLINE_S = 5.0


class Capacity:
    def __init__(self, value: int) -> None:
        self.value = value

    def __call__(self) -> int:
        return self.value


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await work

    asyncio.run(bounded())


def admitted(*turns: Turn) -> list[bool]:
    return [turn.done() and turn.exception() is None for turn in turns]


def test_first_come_first_served() -> None:
    async def work() -> None:
        queue = RequestQueue(Capacity(1), limit=10)
        first, second, third = (queue.join() for _ in range(3))
        assert admitted(first, second, third) == [True, False, False]
        assert queue.waiting == 2
        queue.leave(first)
        assert admitted(second, third) == [True, False]
        queue.leave(second)
        queue.leave(third)
        assert queue.waiting == 0
        assert admitted(queue.join(), queue.join()) == [True, False]

    run(work())


def test_a_newcomer_does_not_pass_those_in_line() -> None:
    async def work() -> None:
        capacity = Capacity(1)
        queue = RequestQueue(capacity, limit=10)
        queue.join()
        waiting = queue.join()
        capacity.value = 2
        late = queue.join()
        assert admitted(waiting, late) == [True, False]

    run(work())


def test_others_pass_one_for_whom_there_is_no_room_and_it_keeps_its_place() -> None:
    async def work() -> None:
        capacity, room = Capacity(1), [False]
        queue = RequestQueue(capacity, limit=10)
        first = queue.join()
        choosy, other, last = queue.join(lambda: room[0]), queue.join(), queue.join()
        queue.leave(first)
        assert admitted(choosy, other, last) == [False, True, False]
        room[0] = True
        queue.leave(other)
        assert admitted(choosy, last) == [True, False]

    run(work())


def test_one_for_whom_there_never_will_be_room_is_told() -> None:
    def never() -> bool:
        raise RequestFailed(Failure(FailureCode.NO_DECODE, "all have failed it"))

    async def work() -> None:
        queue = RequestQueue(Capacity(1), limit=10)
        first, doomed, last = queue.join(), queue.join(never), queue.join()
        queue.leave(first)
        with pytest.raises(RequestFailed, match="all have failed it"):
            await doomed
        assert admitted(last) == [True]
        assert queue.waiting == 0

    run(work())


def test_new_capacity_is_used_when_it_is_told() -> None:
    async def work() -> None:
        capacity = Capacity(1)
        queue = RequestQueue(capacity, limit=10)
        queue.join()
        waiting = queue.join()
        capacity.value = 5
        queue.move_up()
        await waiting

    run(work())


@pytest.mark.parametrize(("capacity", "limit", "code"), [(0, 9, FailureCode.NO_DECODE), (1, 0, FailureCode.OVERLOADED)])
def test_it_refuses_at_once_where_waiting_is_no_use(capacity: int, limit: int, code: FailureCode) -> None:
    async def work() -> None:
        queue = RequestQueue(Capacity(capacity), limit)
        if capacity:
            queue.join()
        with pytest.raises(RequestFailed) as refused:
            queue.join()
        assert refused.value.failure.code is code

    run(work())


def test_room_can_be_asked_for_before_any_work() -> None:
    async def work() -> None:
        queue = RequestQueue(Capacity(1), limit=1)
        queue.check_room()
        queue.join()
        queue.check_room()
        queue.join()
        with pytest.raises(RequestFailed):
            queue.check_room()

    run(work())


def test_one_that_leaves_the_line_holds_nobody_up() -> None:
    async def work() -> None:
        queue = RequestQueue(Capacity(1), limit=1)
        inside, gone = queue.join(), queue.join()
        queue.leave(gone)
        staying = queue.join()
        queue.leave(inside)
        await staying
        assert admitted(queue.join()) == [False]

    run(work())


def test_one_that_leaves_in_the_moment_of_its_turn_passes_it_on() -> None:
    async def work() -> None:
        queue = RequestQueue(Capacity(1), limit=5)
        inside, gone, staying = (queue.join() for _ in range(3))
        queue.leave(inside)  # it is gone's turn, which it has not noticed yet
        queue.leave(gone)
        await staying
        assert queue.waiting == 0
        assert admitted(queue.join()) == [False]

    run(work())


def test_when_nothing_can_serve_any_more_all_in_line_are_told() -> None:
    async def work() -> None:
        capacity = Capacity(1)
        queue = RequestQueue(capacity, limit=5)
        queue.join()
        waiting = [queue.join() for _ in range(3)]
        capacity.value = 0
        queue.move_up()
        for turn in waiting:
            with pytest.raises(RequestFailed) as told:
                await turn
            assert told.value.failure.code is FailureCode.NO_DECODE
            queue.leave(turn)
        assert queue.waiting == 0
        capacity.value = 2
        assert admitted(queue.join(), queue.join()) == [True, False]

    run(work())
