"""One request's run by itself: on a clock that moves with every look at it."""

import asyncio
import itertools

import msgspec
import pytest

from protocol.ledger import Ledger
from protocol.messages import DecodeRequest, Failure, FailureCode, FinishReason, RequestEnded, Role, TokenDelta
from protocol.sampling import SamplingParams
from router.dispatch import Dispatcher
from router.membership import Membership
from router.metrics import Metrics
from router.queueing import RequestFailed
from router.run import Run
from router.token_request import Ended, Restarted, TokenRequest, Tokens
from tests.router.fake_node import node_status

DEADLINE_S = 5.0
IDLE_S = 5.0


class TimedSender:
    """Looks at the clock when a message goes out."""

    def __init__(self) -> None:
        self.clock = itertools.count(1).__next__
        self.sent_at: list[float] = []
        self.sent = asyncio.Event()

    def send(self, instance: str, message: msgspec.Struct) -> bool:
        self.sent_at.append(self.clock())
        self.sent.set()
        return True


def test_a_nodes_share_begins_before_its_request_goes_out_and_ends_after_its_first_token() -> None:
    """So that what the node itself measured always fits in, and no part of the ledger is negative."""

    async def work() -> None:
        sender = TimedSender()
        members = Membership("", 0.0)
        members.observe(node_status("d"), 0.0)
        dispatcher = Dispatcher(members, sender, Metrics(), requests_per_node=1, queue_limit=1, clock=sender.clock)
        request = TokenRequest("key", "", [5], SamplingParams(max_new_tokens=2), received_at=0.0, deadline=1e9)
        async with asyncio.timeout(DEADLINE_S), Run(dispatcher, request, IDLE_S) as run:
            first = asyncio.ensure_future(anext(run))
            await sender.sent.wait()
            came_at = sender.clock()
            dispatcher.on_message("d", TokenDelta(request="key", index=0, tokens=[7]))
            assert await first == Tokens([7])
            assert 0 < run.times.sent < sender.sent_at[0] < came_at < run.times.first_token

    asyncio.run(work())


def test_the_first_token_is_the_first_of_any_choice_and_the_last_of_any_too() -> None:
    async def work() -> None:
        sender = TimedSender()
        members = Membership("", 0.0)
        members.observe(node_status("d"), 0.0)
        dispatcher = Dispatcher(members, sender, Metrics(), requests_per_node=1, queue_limit=1, clock=sender.clock)
        request = TokenRequest("key", "", [5], SamplingParams(max_new_tokens=2), received_at=0.0, deadline=1e9, n=2)
        async with asyncio.timeout(DEADLINE_S), Run(dispatcher, request, IDLE_S) as run:
            first = asyncio.ensure_future(anext(run))
            await sender.sent.wait()
            for choice in (1, 0):
                dispatcher.on_message("d", TokenDelta(request="key", index=0, tokens=[7], choice=choice))
            assert await first == Tokens([7], choice=1)
            first_token = run.times.first_token
            assert await anext(run) == Tokens([7], choice=0)
            assert run.times.first_token == first_token < run.times.last_token

    asyncio.run(work())


class Mailbox:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.box: asyncio.Queue[DecodeRequest] = asyncio.Queue()

    def send(self, instance: str, message: msgspec.Struct) -> bool:
        if isinstance(message, DecodeRequest):
            self.box.put_nowait(message)
        return True


def without_prefills(attempts: int) -> RequestEnded:
    return RequestEnded(
        request="key",
        reason=FinishReason.ERROR,
        tokens=0,
        failure=Failure(FailureCode.NO_PREFILL, "all of them are gone"),
        ledger=Ledger(decode_node="d", attempts=attempts),
    )


def test_a_request_that_its_prefill_nodes_have_failed_is_sent_again_as_long_as_others_come() -> None:
    """To the only decode node, which is not to blame; its attempts are numbered on."""

    async def work() -> None:
        mailbox, members = Mailbox(), Membership("", 0.0)
        members.observe(node_status("d", local_prefill=False), 0.0)
        members.observe(node_status("p1", role=Role.PREFILL, control_address="tcp://p1:1"), 0.0)
        dispatcher = Dispatcher(members, mailbox, Metrics(), requests_per_node=1, queue_limit=1)
        request = TokenRequest("key", "", [5, 6], SamplingParams(max_new_tokens=2), received_at=0.0, deadline=1e12)
        async with asyncio.timeout(DEADLINE_S), Run(dispatcher, request, IDLE_S) as run:
            next_event = asyncio.ensure_future(anext(run))
            sent = await mailbox.box.get()
            assert ([prefill.instance for prefill in sent.prefills], sent.attempts) == (["p1"], 0)
            members.observe(node_status("p2", role=Role.PREFILL, control_address="tcp://p2:1"), 0.0)
            dispatcher.on_message("d", without_prefills(3))
            assert await next_event == Restarted()
            sent = await mailbox.box.get()
            assert ([prefill.instance for prefill in sent.prefills], sent.attempts) == (["p2", "p1"], 3)
            dispatcher.on_message("d", without_prefills(5))
            with pytest.raises(RequestFailed, match="all of them are gone"):
                await anext(run)

    asyncio.run(work())


def test_requests_of_a_node_that_stood_still_wait_for_room_on_another_one_when_it_is_back() -> None:
    """Its own room is of no use to them: it has failed them."""

    async def work() -> None:
        mailbox, members = Mailbox(), Membership("", 0.0)
        members.observe(node_status("slow", pages_free=64), 0.0)
        dispatcher = Dispatcher(members, mailbox, Metrics(), requests_per_node=2, queue_limit=10)
        requests = [
            TokenRequest(key, "", [5], SamplingParams(max_new_tokens=2), received_at=0.0, deadline=1e12)
            for key in ("a", "b", "c")
        ]
        async with (
            asyncio.timeout(DEADLINE_S),
            Run(dispatcher, requests[0], IDLE_S) as one,
            Run(dispatcher, requests[1], IDLE_S) as two,
        ):
            asked = [asyncio.ensure_future(anext(run)) for run in (one, two)]
            assert [(await mailbox.box.get()).request for _ in asked] == ["a", "b"]
            members.observe(node_status("quick"), 0.0)
            async with Run(dispatcher, requests[2], IDLE_S) as three:
                ending = asyncio.ensure_future(anext(three))
                assert (await mailbox.box.get()).request == "c"
                dispatcher.on_lost("slow")
                assert await asked[0] == await asked[1] == Restarted()
                assert mailbox.box.get_nowait().request == "a"
                waiting = asyncio.ensure_future(anext(two))
                dispatcher.queue.move_up()
                await asyncio.sleep(0)
                assert dispatcher.queue.waiting == 1 and mailbox.box.empty()
                dispatcher.on_message(
                    "quick", RequestEnded("c", FinishReason.STOP, 0, None, Ledger(decode_node="quick"))
                )
                assert isinstance(await ending, Ended)
            assert (await mailbox.box.get()).request == "b"
            waiting.cancel()

    asyncio.run(work())
