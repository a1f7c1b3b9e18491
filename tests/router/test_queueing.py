"""The line by itself: order, bounds, and leaving it at any moment."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from protocol.messages import FailureCode
from router.queueing import RequestFailed, RequestQueue

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


async def standing(queue: RequestQueue, count: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(queue.enter()) for _ in range(count)]
    await asyncio.sleep(0)
    assert queue.waiting == count
    return tasks


def test_first_come_first_served() -> None:
    async def work() -> None:
        queue = RequestQueue(Capacity(1), limit=10)
        await queue.enter()
        first, second = await standing(queue, 2)
        queue.leave()
        await first
        assert not second.done() and queue.inside == 1
        queue.leave()
        await second

    run(work())


def test_a_newcomer_does_not_pass_those_in_line() -> None:
    async def work() -> None:
        capacity = Capacity(1)
        queue = RequestQueue(capacity, limit=10)
        await queue.enter()
        (first,) = await standing(queue, 1)
        capacity.value = 2
        late = asyncio.create_task(queue.enter())
        await asyncio.sleep(0)
        assert not late.done()
        queue.move_up()
        await first
        queue.leave()
        await late

    run(work())


@pytest.mark.parametrize(("capacity", "limit", "code"), [(0, 9, FailureCode.NO_DECODE), (1, 0, FailureCode.OVERLOADED)])
def test_it_refuses_at_once_where_waiting_is_no_use(capacity: int, limit: int, code: FailureCode) -> None:
    async def work() -> None:
        queue = RequestQueue(Capacity(capacity), limit)
        if capacity:
            await queue.enter()
        with pytest.raises(RequestFailed) as refused:
            await queue.enter()
        assert refused.value.failure.code is code

    run(work())


def test_one_that_leaves_the_line_holds_nobody_up() -> None:
    async def work() -> None:
        queue = RequestQueue(Capacity(1), limit=1)
        await queue.enter()
        (gone,) = await standing(queue, 1)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        (staying,) = await standing(queue, 1)
        queue.leave()
        await staying
        assert queue.inside == 1

    run(work())


def test_one_that_leaves_in_the_moment_of_its_turn_passes_it_on() -> None:
    async def work() -> None:
        queue = RequestQueue(Capacity(1), limit=5)
        await queue.enter()
        gone, staying = await standing(queue, 2)
        queue.leave()  # it is gone's turn, which it has not noticed yet
        gone.cancel()
        await staying
        assert queue.inside == 1 and queue.waiting == 0

    run(work())


def test_when_nothing_can_serve_any_more_all_in_line_are_told() -> None:
    async def work() -> None:
        capacity = Capacity(1)
        queue = RequestQueue(capacity, limit=5)
        await queue.enter()
        tasks = await standing(queue, 3)
        capacity.value = 0
        queue.move_up()
        told = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, RequestFailed) and one.failure.code is FailureCode.NO_DECODE for one in told)
        assert queue.inside == 1

    run(work())
