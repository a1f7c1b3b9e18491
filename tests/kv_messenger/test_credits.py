"""What one decode node may pin of a prefill engine's memory while others are there; and in which order prompts wait."""

from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.simulated import SimulatedEngine, SimulatedNetwork
from kv_messenger.credits import MAX_WAITING, Credits, Prompt
from kv_messenger.plan import TransferPlan
from kv_messenger.sender_transfer import SenderTransfer
from kv_messenger.sent import Sent, engine_id
from kv_messenger.sources import Source
from protocol.messages import FailureCode
from protocol.ticket import TransferKey
from tests.kv_messenger.builders import BOTH, ScriptedEngine, layout, plan, region
from tests.kv_messenger.crowd import Crowd

PAGE = 4
OF = layout(layers=2, page_size=PAGE)
POOL = 12
"""Blocks."""


def prompt(instance: str, number: int, blocks: int, source: Source) -> Prompt:
    transfer_plan: TransferPlan = plan(OF, blocks * PAGE, list(range(blocks)))
    transfer = SenderTransfer(TransferKey(f"{number}", 1, instance), transfer_plan, 0, 60.0)
    return Prompt(Sent(transfer, source), [7] * transfer_plan.tokens)


def engine(slots: int | None = None) -> Source:
    contexts = region(8, slots * BOTH.slot_bytes) if slots else None
    return Source(ScriptedEngine(), 0, [region(9, POOL * OF.block_bytes(0))], contexts)


class Line:
    """Credits of one engine, with what was granted."""

    def __init__(self, slots: int | None = None) -> None:
        of = msgspec.structs.replace(OF, context=BOTH) if slots else OF
        self.credits, self.source = Credits(of), engine(slots)
        self.granted: list[TransferKey] = []
        self.waiting: list[TransferKey] = []
        self.asked: list[TransferKey] = []
        self.blocks: dict[TransferKey, int] = {}

    def ask(self, instance: str, blocks: int = 1) -> TransferKey:
        asked = prompt(instance, len(self.asked), blocks, self.source)
        key = asked.sent.transfer.key
        self.asked.append(key)
        self.waiting.append(key)
        self.blocks[key] = blocks
        self.credits.ask(asked)
        return key

    def grant(self, alone: bool = False) -> None:
        for granted in self.credits.grant(alone):
            self.granted.append(granted.sent.transfer.key)
            self.waiting.remove(granted.sent.transfer.key)
        assert self.credits.waiting == len(self.waiting)

    def give_back(self, key: TransferKey) -> None:
        self.granted.remove(key)
        self.credits.give_back(key)

    def withdraw(self, key: TransferKey) -> None:
        self.waiting.remove(key)
        self.credits.withdraw(key)

    def taken(self, instance: str) -> int:
        """Blocks."""
        return sum(self.blocks[key] for key in self.granted if key.instance == instance)


def test_one_decode_node_takes_what_it_leaves_free_and_the_next_what_is_free_then() -> None:
    line = Line()
    for name in ("a", "b", "c"):
        for _ in range(POOL):
            line.ask(name)
        line.grant()
    assert [line.taken(name) for name in ("a", "b", "c")] == [POOL // 2, POOL // 4, 1]


def test_one_that_is_alone_takes_all() -> None:
    line = Line()
    for _ in range(2 * POOL):
        line.ask("a")
    line.grant(alone=True)
    assert line.taken("a") == 2 * POOL, "the engine's own queue holds what has no room yet"


def test_a_prompt_of_any_size_may_go_where_its_decode_node_has_nothing() -> None:
    line = Line()
    large = line.ask("a", POOL)
    line.ask("a")
    line.ask("b", POOL)
    line.grant()
    assert line.granted == [large, line.asked[2]]
    line.give_back(large)
    line.grant()
    assert line.asked[1] in line.granted


def test_prompts_of_one_decode_node_do_not_overtake_each_other() -> None:
    line = Line()
    first, large, small = line.ask("a", 2), line.ask("a", 8), line.ask("a", 1)
    line.grant()
    assert line.granted == [first]
    line.give_back(first)
    line.grant()
    assert line.granted == [large] and small not in line.granted


def test_context_slots_are_shared_as_pages_are() -> None:
    line = Line(slots=4)
    for _ in range(4):
        line.ask("a")
    line.grant()
    assert line.taken("a") == 2


def test_who_was_withdrawn_waits_no_longer() -> None:
    line = Line()
    line.withdraw(line.ask("a"))
    line.grant()
    assert line.granted == []
    line.credits.withdraw(line.asked[0])


STEP = st.one_of(
    st.tuples(st.sampled_from("abc"), st.integers(1, POOL)),
    st.tuples(st.just("give back"), st.integers(0, 50)),
    st.tuples(st.just("withdraw"), st.integers(0, 50)),
)


@given(steps=st.lists(STEP, max_size=60))
def test_whoever_waits_has_something_and_what_is_given_back_lets_everybody_on(steps: list[tuple[str, int]]) -> None:
    line = Line()
    for what, number in steps:
        if what == "give back":
            for key in line.granted[number : number + 1]:
                line.give_back(key)
        elif what == "withdraw":
            for key in line.waiting[number : number + 1]:
                line.withdraw(key)
        else:
            line.ask(what, number)
        line.grant()
        assert {key.instance for key in line.waiting} <= {key.instance for key in line.granted}
        several = [name for name in "abc" if sum(key.instance == name for key in line.granted) > 1]
        assert all(line.taken(name) <= POOL // 2 for name in several)
    while line.granted:
        line.give_back(line.granted[0])
        line.grant()
    assert not line.waiting


# ---- in the sender ----


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    """Two decode nodes, and a prefill engine with room for eight prompts."""
    network = SimulatedNetwork(0, None)
    opened = Crowd(partial(SimulatedEngine, network), receivers=2, prompts=MAX_WAITING + 20, room=8)
    yield opened
    opened.close()


def greeted(crowd: Crowd) -> None:
    """Both have got a prompt's KV."""
    for want in crowd.wants:
        want.fetch()
    crowd.run_until(lambda: len(crowd.engine.submitted) == 2)
    crowd.compute_all()
    crowd.run_until(lambda: crowd.at_rest)
    crowd.engine.released.clear()


def test_a_decode_node_that_stands_still_leaves_room_for_the_other(crowd: Crowd) -> None:
    """Of ten prompts four are computed and pinned. The other's go on, one after the other; the rest of the ten never
    reaches the engine, also when the session is given up."""
    greeted(crowd)
    still, other = crowd.wants
    asked = [still.fetch() for _ in range(10)]
    crowd.run_until(lambda: crowd.sender.transfers == 10)
    assert crowd.engine.submitted == [engine_id(key) for key in asked[:4]] and crowd.sender.waiting == 6
    still.stands_still = True
    crowd.announce(crowd.engine.submitted)
    crowd.engine.submitted.clear()
    for _ in range(6):
        other.owner.safe.clear()
        other.fetch()
        crowd.run_until(lambda: crowd.engine.submitted)
        crowd.compute_all()
        crowd.run_until(lambda: other.owner.safe)
    crowd.give_up(still)
    crowd.turn()
    assert crowd.engine.submitted == [] and crowd.engine.aborted == [engine_id(key) for key in asked[:4]]
    assert (crowd.sender.transfers, crowd.sender.waiting) == (0, 0)


def test_prompts_go_on_as_those_before_them_are_released(crowd: Crowd) -> None:
    greeted(crowd)
    want, _ = crowd.wants
    asked = [want.fetch() for _ in range(10)]
    crowd.run_until(lambda: crowd.sender.transfers == 10)
    computed: list[str] = []
    while len(computed) < 10:
        computed += crowd.engine.submitted
        assert 0 < len(crowd.engine.submitted) <= 4
        crowd.compute_all()
        crowd.run_until(lambda: crowd.engine.submitted or crowd.at_rest)
    assert computed == [engine_id(key) for key in asked]
    assert len(want.owner.arrivals) == 11 and crowd.at_rest


def test_one_that_waits_can_be_aborted_and_can_expire_without_a_word_to_the_engine(crowd: Crowd) -> None:
    greeted(crowd)
    want, _ = crowd.wants
    asked = [want.fetch(deadline_s=60.0 if number < 4 else 1.0) for number in range(6)]
    crowd.run_until(lambda: crowd.sender.transfers == 6)
    want.receiver.abort(asked[4], None)
    crowd.run_until(lambda: crowd.sender.transfers == 5)
    crowd.now += 1.5
    crowd.sender.on_tick(crowd.now)
    assert crowd.sender.waiting == 0 and crowd.sender.transfers == 4
    assert crowd.engine.aborted == crowd.engine.released == []
    crowd.compute_all()
    crowd.run_until(lambda: crowd.at_rest)
    assert (len(want.owner.arrivals), len(want.owner.safe)) == (5, 7)


def test_too_many_that_wait_are_refused_and_the_other_is_not(crowd: Crowd) -> None:
    greeted(crowd)
    full, other = crowd.wants
    for _ in range(4 + MAX_WAITING + 3):
        full.fetch()
    crowd.run_until(lambda: len(full.owner.failures) == 3)
    assert {failure.code for failure in full.owner.failures} == {FailureCode.OVERLOADED}
    assert crowd.sender.waiting == MAX_WAITING and len(full.owner.safe) == 4
    other.fetch()
    crowd.run_until(lambda: len(crowd.engine.submitted) == 5)
