"""A rail that fails with writes on their way: the peer says what became of them, and each page is counted once."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from fabric.api import Arrived, EndpointFailed, OverCounted, PageWrites, RailInDoubt, WritesEnded, WritesFailed
from fabric.counting import Tallies
from fabric.errors import EndpointClosed, FabricUsageError, FenceFailed
from fabric.faults import Faults
from fabric.immediates import pack
from fabric.limits import Limits
from tests.fabric.conftest import Fabric, SimulatedFabric, each_of
from tests.fabric.party import Party, drive, pages, settle

PAGE = 16 << 10
TRIES = 1000
LATE = Faults(reorder=True, max_delay=200)
IMMEDIATE, OTHER, WARMING = pack(7, 1), pack(8, 1), pack(9, 1)
FABRICS: dict[str, Callable[[], Fabric]] = {"net": lambda: Fabric("net"), "simulated": lambda: SimulatedFabric(LATE)}
fabric = each_of(FABRICS)


@pytest.fixture
def simulated() -> Iterator[SimulatedFabric]:
    opened = SimulatedFabric(LATE)
    yield opened
    opened.close()


class Pair:
    """A sender that asks its peer, every rail of it connected, over memories of `count` pages."""

    def __init__(self, fabric: Fabric, rails: int = 2, count: int = 256) -> None:
        self.fabric, self.count = fabric, count
        self.sender, self.receiver = fabric.party(rails=rails), fabric.party(rails=rails)
        self.source, self.source_region = self.sender.memory(count * PAGE)
        self.target, self.target_region = self.receiver.memory(count * PAGE, fill=0)
        self.landing = self.receiver.engine.open_landing("sender")
        self.sending = self.sender.engine.connect("receiver", self.landing.address, asks_peer=True)
        self._connect_all()

    def _connect_all(self) -> None:
        for _ in range(TRIES):
            self.sender.engine.write(self.sending, self.batch(WARMING, [0]))
            drive(*self.both, until=lambda: bool(self.sender.of(WritesEnded)))
            self.sender.events.clear()
            if all(self.sender.engine.writes_by_rail()):
                break
        assert all(self.sender.engine.writes_by_rail())
        self.target[:] = 0
        self._before = self.sender.engine.counters()

    @property
    def posted(self) -> int:
        """Once for each time that a page was."""
        return self.sender.engine.counters().writes_posted - self._before.writes_posted

    @property
    def completed(self) -> int:
        return self.sender.engine.counters().writes_completed - self._before.writes_completed

    @property
    def failed(self) -> int:
        """Once for each time that a page was posted in vain: it has to be posted again, or was given up in doubt."""
        return self.sender.engine.counters().writes_failed - self._before.writes_failed

    @property
    def both(self) -> tuple[Party, Party]:
        return self.sender, self.receiver

    def batch(self, immediate: int, indices: list[int] | None = None) -> PageWrites:
        chosen = list(range(self.count)) if indices is None else indices
        return pages(self.source_region, self.target_region.remote, chosen, PAGE, immediate)

    def write(self, immediate: int = IMMEDIATE, indices: list[int] | None = None) -> int:
        return self.sender.engine.write(self.sending, self.batch(immediate, indices))

    def turn(self, *parties: Party, turns: int = 1) -> None:
        for _ in range(turns):
            for party in parties:
                party.events += party.engine.progress(0.0)

    def cut(self, rail: int = 1) -> None:
        """With its writes on their way."""
        self.fabric.cut(self.sender, rail)

    def doubt(self, rail: int = 1) -> RailInDoubt:
        """Once the sender has noticed."""
        drive(self.sender, until=lambda: any(event.rail == rail for event in self.sender.of(RailInDoubt)))
        return next(event for event in self.sender.of(RailInDoubt) if event.rail == rail)

    def ask(self, doubt: RailInDoubt) -> list[int]:
        return self.receiver.engine.fence_rails(self.landing, doubt.remotes, doubt.completed)

    def resolve(self, doubt: RailInDoubt) -> list[int]:
        again = self.ask(doubt)
        self.sender.engine.settle_rail(self.sending, doubt.rail, again)
        return again

    def until_moved(self) -> WritesEnded:
        """Each page was counted once, and lies where it belongs."""
        drive(*self.both, until=lambda: bool(self.sender.of(WritesEnded)) and bool(self.receiver.of(Arrived)))
        (arrived,), (ended,) = self.receiver.of(Arrived), self.sender.of(WritesEnded)
        assert (arrived.count, ended.posted, ended.completed, ended.error) == (*(self.count,) * 3, None)
        settle(*self.both)
        assert not self.receiver.of(OverCounted) and not self.sender.of(EndpointFailed)
        assert np.array_equal(self.source, self.target)
        assert self.completed + self.failed == self.posted
        return ended


@pytest.mark.parametrize("turns", [1, 3, 8])
@pytest.mark.parametrize("late", [0, 4], ids=["both", "the receiver is ahead"])
def test_writes_of_a_rail_that_fails_are_moved_to_the_others(fabric: Fabric, turns: int, late: int) -> None:
    pair = Pair(fabric)
    pair.receiver.engine.expect(pair.landing, IMMEDIATE, pair.count)
    pair.write()
    pair.turn(*pair.both, turns=turns)
    pair.turn(pair.receiver, turns=late)
    pair.cut()
    doubt = pair.doubt()
    assert doubt.remotes == (1,) and set(doubt.completed) == {IMMEDIATE}
    assert pair.resolve(doubt) == [IMMEDIATE]
    before = pair.sender.engine.writes_by_rail()[1]
    pair.until_moved()
    assert pair.sender.engine.writes_by_rail()[1] == before
    assert pair.completed == pair.count and pair.failed > 0
    assert [party.engine.counters().rails_lost for party in pair.both] == [1, 1]
    assert pair.sender.engine.gauges().outstanding == 0


def test_the_endpoint_goes_on_with_its_other_rails(fabric: Fabric) -> None:
    pair = Pair(fabric)
    pair.receiver.engine.expect(pair.landing, IMMEDIATE, pair.count)
    pair.write()
    pair.turn(*pair.both, turns=2)
    pair.cut()
    pair.resolve(pair.doubt())
    pair.until_moved()
    for party in pair.both:
        party.events.clear()
    pair.target[:] = 0
    pair.receiver.engine.expect(pair.landing, OTHER, pair.count)
    pair.write(OTHER)
    pair.until_moved()


def in_doubt(pair: Pair) -> tuple[int, int, RailInDoubt]:
    """A batch whose rail 1 is cut with writes on their way, its expectation, and what the sender says of it."""
    expectation = pair.receiver.engine.expect(pair.landing, IMMEDIATE, pair.count)
    handle = pair.write()
    pair.turn(*pair.both)
    pair.cut()
    return handle, expectation, pair.doubt()


@pytest.mark.parametrize("forgotten", [False, True])
def test_what_is_whole_or_over_is_not_written_again(fabric: Fabric, forgotten: bool) -> None:
    """Its pages may have another owner by now."""
    pair = Pair(fabric)
    _, expectation, doubt = in_doubt(pair)
    if forgotten:
        pair.receiver.engine.forget(expectation)
    else:
        pair.receiver.engine.revise(expectation, pair.receiver.engine.counted(expectation))
    assert pair.resolve(doubt) == []
    drive(*pair.both, until=lambda: bool(pair.sender.of(WritesEnded)))
    (ended,) = pair.sender.of(WritesEnded)
    assert (ended.posted, ended.completed, ended.error) == (pair.count, pair.count, None)
    assert (pair.posted, pair.completed, pair.failed) == (pair.count, pair.count, 0)


def test_what_another_generation_or_landing_expects_is_none_of_the_lost_rails_business(fabric: Fabric) -> None:
    pair = Pair(fabric)
    _, expectation, doubt = in_doubt(pair)
    pair.receiver.engine.forget(expectation)
    other = pair.receiver.engine.open_landing("other")
    later = pair.receiver.engine.expect(pair.landing, IMMEDIATE + 1, 5)
    foreign = pair.receiver.engine.expect(other, OTHER, 5)
    completed = {**doubt.completed, OTHER: 0}
    assert pair.receiver.engine.fence_rails(pair.landing, doubt.remotes, completed) == []
    assert pair.receiver.engine.counted(later) == pair.receiver.engine.counted(foreign) == 0


def test_a_batch_that_is_cancelled_in_doubt_ends_at_once_with_all_that_may_have_landed(fabric: Fabric) -> None:
    pair = Pair(fabric)
    handle, expectation, doubt = in_doubt(pair)
    posted, completed = pair.sender.engine.cancel(handle)
    drive(*pair.both, until=lambda: bool(pair.sender.of(WritesEnded)))
    (ended,) = pair.sender.of(WritesEnded)
    assert (ended.posted, ended.cancelled) == (posted, True) and ended.error is not None
    assert completed <= ended.completed < posted and not pair.sender.of(WritesFailed)
    settle(*pair.both)
    assert pair.resolve(doubt) == [IMMEDIATE]
    settle(*pair.both)
    assert pair.receiver.engine.counted(expectation) == ended.completed
    assert (pair.posted, pair.completed, pair.failed) == (posted, ended.completed, posted - ended.completed)
    assert pair.sender.engine.gauges().outstanding == 0


def test_a_batch_that_is_cancelled_after_the_answer_has_posted_what_can_still_be_counted(fabric: Fabric) -> None:
    pair = Pair(fabric)
    handle, expectation, doubt = in_doubt(pair)
    pair.resolve(doubt)
    pair.sender.engine.cancel(handle)
    drive(*pair.both, until=lambda: bool(pair.sender.of(WritesEnded)))
    (ended,) = pair.sender.of(WritesEnded)
    assert ended.posted == ended.completed < pair.count and ended.error is None
    settle(*pair.both)
    assert pair.receiver.engine.counted(expectation) == ended.posted


def test_two_rails_may_be_in_doubt_at_once(fabric: Fabric) -> None:
    pair = Pair(fabric, rails=3)
    pair.receiver.engine.expect(pair.landing, IMMEDIATE, pair.count)
    pair.write()
    pair.turn(*pair.both, turns=2)
    pair.cut(1)
    first = pair.doubt(1)
    pair.turn(*pair.both)
    pair.cut(2)
    for doubt in (pair.doubt(2), first):
        pair.resolve(doubt)
    pair.until_moved()
    assert pair.sender.engine.counters().rails_lost == 2


def test_what_was_moved_is_moved_again(fabric: Fabric) -> None:
    pair = Pair(fabric, rails=3)
    pair.receiver.engine.expect(pair.landing, IMMEDIATE, pair.count)
    pair.write()
    pair.turn(*pair.both, turns=2)
    for rail in (1, 2):
        pair.cut(rail)
        pair.resolve(pair.doubt(rail))
        pair.turn(pair.sender)
    pair.until_moved()


def test_the_last_rail_breaks_the_endpoint_and_ends_what_is_in_doubt(fabric: Fabric) -> None:
    pair = Pair(fabric)
    _, _, doubt = in_doubt(pair)
    pair.turn(pair.sender)
    pair.cut(0)
    drive(pair.sender, until=lambda: bool(pair.sender.of(WritesEnded)))
    (ended,), (failed,) = pair.sender.of(WritesEnded), pair.sender.of(EndpointFailed)
    assert ended.error is not None and ended.completed < ended.posted and failed.rail == 0
    pair.sender.engine.settle_rail(pair.sending, doubt.rail, [IMMEDIATE])
    settle(pair.sender)
    assert pair.sender.engine.gauges().outstanding == 0
    assert len(pair.sender.of(WritesEnded)) == len(pair.sender.of(WritesFailed)) == 1


def test_an_endpoint_is_closed_in_doubt(fabric: Fabric) -> None:
    pair = Pair(fabric)
    _, _, doubt = in_doubt(pair)
    pair.sender.engine.close_endpoint(pair.sending)
    drive(pair.sender, until=lambda: bool(pair.sender.of(WritesEnded)))
    assert pair.sender.of(WritesEnded)[0].cancelled and pair.sender.engine.gauges().outstanding == 0
    assert pair.failed > 0
    with pytest.raises(EndpointClosed):
        pair.sender.engine.settle_rail(pair.sending, doubt.rail, [])


def test_pages_that_no_other_rail_reaches_break_the_endpoint(fabric: Fabric) -> None:
    pair = Pair(fabric)
    near = pair.sender.engine.register(pair.source.ctypes.data, pair.source.nbytes, rails=[1])
    every = list(range(pair.count))
    pair.sender.engine.write(pair.sending, pages(near, pair.target_region.remote, every, PAGE, IMMEDIATE))
    pair.turn(pair.sender)
    pair.cut()
    drive(pair.sender, until=lambda: bool(pair.sender.of(EndpointFailed)))
    assert not pair.sender.of(RailInDoubt)


def test_rails_that_write_to_the_same_one_of_the_peer_break_the_endpoint(fabric: Fabric) -> None:
    """The peer cannot tell whose writes it has counted there."""
    sender, receiver = fabric.party(rails=3), fabric.party(rails=2)
    (_, source), (_, target) = sender.memory(256 * PAGE), receiver.memory(256 * PAGE)
    landing = receiver.engine.open_landing("sender")
    sending = sender.engine.connect("receiver", landing.address, asks_peer=True)
    every = list(range(256))
    for number in range(TRIES):
        sender.engine.write(sending, pages(source, target.remote, every, PAGE, number))
        drive(sender, receiver, until=lambda: bool(sender.of(WritesEnded)))
        sender.events.clear()
        if all(sender.engine.writes_by_rail()):
            break
    sender.engine.write(sending, pages(source, target.remote, every, PAGE, 5))
    sender.events += sender.engine.progress(0.0)
    fabric.cut(sender, 2)
    drive(sender, until=lambda: bool(sender.of(EndpointFailed)))
    assert sender.of(EndpointFailed)[0].rail == 2 and not sender.of(RailInDoubt)


def test_nobody_is_asked_who_is_not_to_be(fabric: Fabric) -> None:
    pair = Pair(fabric)
    pair.sending = pair.sender.engine.connect("receiver", pair.landing.address)
    before = pair.sender.engine.writes_by_rail()[1]
    while pair.sender.engine.writes_by_rail()[1] == before:
        pair.write(IMMEDIATE, [0])
        drive(*pair.both, until=lambda: bool(pair.sender.of(WritesEnded)))
        pair.sender.events.clear()
    pair.write()
    pair.turn(pair.sender)
    pair.cut()
    drive(pair.sender, until=lambda: bool(pair.sender.of(EndpointFailed)))
    assert pair.sender.of(EndpointFailed)[0].rail == 1 and not pair.sender.of(RailInDoubt)


def test_nothing_lands_on_a_fenced_rail(simulated: SimulatedFabric) -> None:
    """What was on its way comes late: but for the fence it would land after the pages have got another owner."""
    pair = Pair(simulated)
    _, expectation, doubt = in_doubt(pair)
    assert simulated.network.in_flight > 0
    pair.ask(doubt)
    pair.receiver.engine.forget(expectation)
    pair.sender.engine.close_endpoint(pair.sending)
    on_rail_0 = pair.target.copy()
    pair.receiver.engine.close_endpoint(pair.landing)
    settle(*pair.both, turns=100)
    assert simulated.network.in_flight == 0 and np.array_equal(on_rail_0, pair.target)


def test_a_count_is_not_raised_on_the_senders_word(fabric: Fabric) -> None:
    pair = Pair(fabric)
    _, expectation, doubt = in_doubt(pair)
    settle(pair.receiver)
    counted = pair.receiver.engine.counted(expectation)
    claimed = {IMMEDIATE: pair.count}
    assert pair.receiver.engine.fence_rails(pair.landing, doubt.remotes, claimed) == [IMMEDIATE]
    assert pair.receiver.engine.counted(expectation) >= counted


@pytest.mark.parametrize("rails", [[0, 1, 2], [2], [-1]], ids=str)
def test_rails_that_there_are_none_of_cannot_be_fenced(fabric: Fabric, rails: list[int]) -> None:
    engine = fabric.party(rails=2).engine
    with pytest.raises(FabricUsageError):
        engine.fence_rails(engine.open_landing("sender"), rails, {})


def test_a_rail_is_fenced_once_and_never_the_only_one(fabric: Fabric) -> None:
    pair, single = Pair(fabric), fabric.party(rails=1).engine
    assert pair.receiver.engine.fence_rails(pair.landing, [1], {}) == []
    with pytest.raises(FabricUsageError):
        pair.receiver.engine.fence_rails(pair.landing, [1], {})
    with pytest.raises(FabricUsageError):
        single.fence_rails(single.open_landing("sender"), [0], {})
    pair.receiver.engine.close_endpoint(pair.landing)
    with pytest.raises(EndpointClosed):
        pair.receiver.engine.fence_rails(pair.landing, [0], {})


def test_a_fence_of_a_rail_that_failed_says_so() -> None:
    fabric = SimulatedFabric(Faults(fail_fence=1), rails=2)
    engine = fabric.party().engine
    with pytest.raises(FenceFailed, match="of sender are not closed"):
        engine.fence_rails(engine.open_landing("sender"), [1], {})
    fabric.close()


def test_a_provider_that_closes_landings_of_the_dead_alone_fences_no_rail_and_asks_nobody() -> None:
    fabric = Fabric("tcp;ofi_rxm", rails=2)
    engine = fabric.party(Limits()).engine
    with pytest.raises(FabricUsageError):
        engine.fence_rails(engine.open_landing("sender"), [1], {})
    fabric.close()


def test_tallies_are_of_each_slots_latest_generation() -> None:
    tallies = Tallies()
    for immediate in (pack(3, 1), pack(4, 1)):
        tallies.begin(immediate)
        tallies.add(immediate)
    tallies.begin(pack(3, 2))
    tallies.add(pack(3, 1))
    tallies.add(pack(3, 2))
    tallies.begin(pack(3, 2))
    assert [tallies.of(pack(3, 1)), tallies.of(pack(3, 2)), tallies.of(pack(4, 1)), tallies.of(pack(5, 1))] == [
        0,
        1,
        1,
        0,
    ]
