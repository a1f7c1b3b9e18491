"""How a node knows its router: every tick one NodeStatus, and what the acknowledgements, or their absence, mean."""

from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from protocol import PROTOCOL_VERSION
from protocol.channel import ControlThread, Link
from protocol.context import NO_CONTEXT
from protocol.messages import (
    MAX_DELTAS,
    Abort,
    ChoiceEnded,
    DecodeRequest,
    Failure,
    FailureCode,
    FinishReason,
    Message,
    Nack,
    NodeStatus,
    Role,
    StatusAck,
    TokenDelta,
    TokenDeltas,
    ToNode,
)
from protocol.router_link import MISSED_ACKS, RouterLink
from protocol.sampling import SamplingParams

ADDRESS = "tcp://127.0.0.1:5550"
STATUS = NodeStatus(
    protocol_version=PROTOCOL_VERSION,
    role=Role.DECODE,
    instance="instance",
    name="decode-1",
    control_address="",
    status_address="",
    compatibility="digest",
    dtype="float32",
    context=NO_CONTEXT,
    tokenizer="digest",
    model="tiny",
    provider="simulated",
    ready=True,
    draining=False,
    local_prefill=False,
    page_size=16,
    pages_total=8,
    pages_free=8,
    pages_quarantined=0,
    running=0,
    waiting=0,
    max_context=128,
)
REQUEST = DecodeRequest(
    request="A",
    public_id="",
    prompt=[5],
    sampling=SamplingParams(max_new_tokens=1),
    deadline_s=1.0,
    prefills=[],
)


class FakeControl:
    """Keeps what was sent; the test is the router. What is posted runs at once, or with the next `turn` if it is
    `busy`."""

    def __init__(self) -> None:
        self.busy = False
        self.posted: list[Callable[[], None]] = []
        self.sent: list[Message] = []
        self.dialled: list[str] = []
        self.answer: Callable[[Message], None] = lambda _: None

    def dial(self, address: str, expected: Any, handler: Callable[[Link, bytes, Any], None]) -> Link:
        assert expected == ToNode
        link = Link(cast(Any, None), expected, handler, bound=False)
        self.dialled.append(address)
        self.answer = lambda message: handler(link, b"", message)
        return link

    def send_now(self, link: Link, message: Message) -> bool:
        self.sent.append(message)
        return True

    def post(self, action: Callable[[], None]) -> None:
        self.posted.append(action)
        if not self.busy:
            self.turn()

    def turn(self) -> None:
        posted, self.posted = self.posted, []
        for action in posted:
            action()


class World:
    def __init__(self) -> None:
        self.control = FakeControl()
        self.status = STATUS
        self.requests: list[DecodeRequest | Abort] = []
        self.lost = 0
        self.link = RouterLink(cast(ControlThread, self.control), lambda: self.status, self.requests.append, self.lose)
        self.link.dial(ADDRESS)

    def lose(self) -> None:
        self.lost += 1

    def ack(self, router: str = "router-1", refusal: str | None = None) -> None:
        self.control.answer(StatusAck(router_instance=router, refusal=refusal))

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.link.on_tick()


@pytest.fixture
def world() -> World:
    return World()


def test_it_announces_itself_when_it_dials_and_is_registered_by_the_answer(world: World) -> None:
    assert world.control.dialled == [ADDRESS] and world.control.sent == [STATUS]
    assert not world.link.registered
    world.ack()
    assert world.link.registered and world.lost == 0


def test_every_tick_sends_the_status_of_that_moment(world: World) -> None:
    for free in (5, 3):
        world.status = msgspec.structs.replace(STATUS, pages_free=free)
        world.ticks(1)
    assert [status.pages_free for status in world.control.sent if isinstance(status, NodeStatus)] == [8, 5, 3]


def test_a_router_that_answers_every_status_is_never_lost(world: World) -> None:
    for _ in range(20):
        world.ack()
        world.ticks(1)
    assert world.link.registered and world.lost == 0


def test_a_router_that_missed_too_many_is_lost_once(world: World) -> None:
    world.ack()
    world.ticks(MISSED_ACKS)
    assert world.link.registered and world.lost == 0
    world.ticks(1)
    assert not world.link.registered and world.lost == 1
    world.ticks(10)
    assert world.lost == 1


def test_one_answer_makes_up_for_those_that_were_missed(world: World) -> None:
    world.ack()
    for _ in range(5):
        world.ticks(MISSED_ACKS)
        world.ack()
    assert world.lost == 0


def test_a_router_that_was_never_there_cannot_be_lost(world: World) -> None:
    world.ticks(10 * MISSED_ACKS)
    assert world.lost == 0 and len(world.control.sent) == 1 + 10 * MISSED_ACKS


def test_a_lost_router_that_answers_again_is_registered_with(world: World) -> None:
    world.ack()
    world.ticks(MISSED_ACKS + 1)
    world.ack()
    assert world.link.registered and world.lost == 1


def test_another_router_instance_ends_the_work_of_the_one_before(world: World) -> None:
    world.ack("router-1")
    world.ack("router-2")
    assert world.lost == 1 and world.link.registered
    world.ack("router-2")
    assert world.lost == 1


def test_a_refusal_is_an_answer_but_no_registration_and_may_be_withdrawn(world: World) -> None:
    world.ack(refusal="another tokenizer")
    assert not world.link.registered
    world.ack()
    assert world.link.registered
    world.ack(refusal="another tokenizer")
    assert not world.link.registered and world.lost == 0


def test_a_refusal_is_logged_in_the_routers_words_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        for _ in range(3):
            world.ack(refusal="another tokenizer")
    said = [record.__dict__["fields"]["refusal"] for record in caplog.records if "fields" in record.__dict__]
    assert said == ["another tokenizer"]


def test_requests_and_aborts_are_handed_on_in_order(world: World) -> None:
    for message in (REQUEST, Abort(request="A")):
        world.control.answer(message)
    assert world.requests == [REQUEST, Abort(request="A")]


def test_a_nack_reaches_nobody(world: World) -> None:
    world.control.answer(Nack(failure=Failure(FailureCode.UNSUPPORTED, "what was that?")))
    assert world.requests == [] and world.lost == 0


def test_answers_leave_in_order(world: World) -> None:
    deltas = [TokenDelta(request="A", index=i, tokens=[i]) for i in range(3)]
    for delta in deltas:
        world.link.send(delta)
    assert world.control.sent[1:] == deltas


def test_tokens_that_wait_for_the_same_turn_share_a_frame(world: World) -> None:
    deltas = [TokenDelta(request="A", index=i, tokens=[i]) for i in range(4)]
    end = ChoiceEnded(request="A", choice=0, reason=FinishReason.STOP)
    world.control.busy = True
    for message in (*deltas[:3], end, deltas[3]):
        world.link.send(message)
    assert len(world.control.posted) == 1
    world.control.turn()
    assert world.control.sent[1:] == [TokenDeltas(deltas=deltas[:3]), end, deltas[3]]


def test_a_frame_holds_so_many_tokens_and_no_more(world: World) -> None:
    deltas = [TokenDelta(request="A", index=i, tokens=[i]) for i in range(MAX_DELTAS + 1)]
    world.control.busy = True
    for delta in deltas:
        world.link.send(delta)
    world.control.turn()
    assert world.control.sent[1:] == [TokenDeltas(deltas=deltas[:MAX_DELTAS]), deltas[MAX_DELTAS]]
