"""A rail fails in the middle of a transfer, and the transfer goes on: both sides, over real libfabric and simulated."""

from collections.abc import Callable, Iterator

import msgspec
import pytest

from fabric.api import Landing, TransferEngine
from fabric.libfabric import open_engine
from fabric.rails import Rail
from fabric.simulated import Faults, SimulatedEngine, SimulatedNetwork
from kv_messenger.lost_rails import RAIL_DEADLINE_S
from kv_messenger.peers import RAILS_AGAIN_S
from protocol.messages import FailureCode, Hello, RailFenced, RailLost, WritesInDoubt
from protocol.ticket import TransferKey
from tests.fabric.cut_rail import cut_connections
from tests.kv_messenger.layouts import of
from tests.kv_messenger.pairing import Pair, deliver_to_receiver, deliver_to_sender, expect_whole

TOKENS, CHUNK = 4096, 512
LAYOUT = of(4, 1, 16)


class TwoRails(Pair):
    """A prefill and a decode node with two rails each, and every message between them, in order."""

    def __init__(self, open_fabric: Callable[[], TransferEngine], network: SimulatedNetwork | None, seed: int) -> None:
        self.now = 1000.0
        super().__init__(open_fabric, LAYOUT, LAYOUT, TOKENS, seed=seed, clock=lambda: self.now)
        self.network = network
        self.said: list[msgspec.Struct] = []
        self.lost: list[RailLost] = []
        """Messages that do not reach the decode node while `deaf`."""
        self.deaf = False

    def _deliver(self) -> None:
        while self._to_sender:
            message = self._to_sender.popleft()
            self.said.append(message)
            deliver_to_sender(self.sender, message)
        while self._to_receiver:
            message = self._to_receiver.popleft()
            self.said.append(message)
            if isinstance(message, RailLost) and self.deaf:
                self.lost.append(message)
            else:
                deliver_to_receiver(self.receiver, message)

    def wait(self, seconds: float) -> None:
        """A second at a time, in which both hear of each other and no write moves."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            self.tick()

    def heard(self, kind: type[msgspec.Struct]) -> list[msgspec.Struct]:
        return [message for message in self.said if isinstance(message, kind)]

    @property
    def posted(self) -> list[int]:
        return self.fabrics[0].writes_by_rail()

    def use_both(self) -> None:
        """One transfer, or more: by then both rails are connected."""
        for number in range(50):
            self.fetch(f"warming {number}")
            self.finish()
            self.owner.arrivals.clear()
            self.owner.safe.clear()
            self.targets[0].pools[:] = 0
            if all(self.posted):
                return

    def cut_in_flight(self, rail: int = 1) -> None:
        """Once some writes of the transfer have gone that way."""
        before = self.posted[rail]
        self.run_until(lambda: self.posted[rail] > before, CHUNK, receiving=False)
        if self.network is None:
            cut_connections(f"127.0.0.{rail + 1}")
        else:
            sender = self.fabrics[0]
            assert isinstance(sender, SimulatedEngine)
            self.network.cut(sender, rail)

    def finish(self) -> None:
        self.run_until(lambda: self.owner.safe and (self.owner.arrivals or self.owner.failures), CHUNK)
        self.run_until(lambda: not self.sender.transfers and not self.receiver.transfers, CHUNK)


@pytest.fixture(params=["net", "reordering"])
def pair(request: pytest.FixtureRequest, seed: int) -> Iterator[TwoRails]:
    network = None if request.param == "net" else SimulatedNetwork(seed, Faults(reorder=True, max_delay=200))
    rails = [Rail("127.0.0.1"), Rail("127.0.0.2")]

    def open_fabric() -> TransferEngine:
        return open_engine("net", rails=rails) if network is None else SimulatedEngine(network, rails=2)

    opened = TwoRails(open_fabric, network, seed)
    opened.use_both()
    yield opened
    opened.close()


def over_simulated(seed: int, open_receiver: type[SimulatedEngine] = SimulatedEngine) -> TwoRails:
    """Over a network that nothing happens on by itself."""
    network = SimulatedNetwork(seed, Faults(reorder=True, max_delay=200))
    kinds: list[type[SimulatedEngine]] = [open_receiver, SimulatedEngine]
    opened = TwoRails(lambda: kinds.pop()(network, rails=2), network, seed)
    opened.use_both()
    return opened


@pytest.fixture
def scripted(seed: int) -> Iterator[TwoRails]:
    opened = over_simulated(seed)
    yield opened
    opened.close()


class ForTheDeadAlone(SimulatedEngine):
    def fence_needs_dead_peer(self, landing: Landing) -> bool:
        return True


def in_doubt(pair: TwoRails) -> RailLost:
    pair.deaf = True
    pair.fetch()
    pair.cut_in_flight()
    pair.run_until(lambda: pair.lost, CHUNK)
    return pair.lost[0]


def test_a_transfer_goes_on_over_the_other_rail(pair: TwoRails) -> None:
    """In the same attempt and session, each write counted once."""
    counted = pair.fabrics[1].counters().over_counts
    pair.fetch()
    pair.cut_in_flight()
    pair.finish()
    assert not pair.owner.failures and len(pair.owner.arrivals) == 1
    expect_whole(pair.targets[0], TOKENS, pair.whole_pages)
    assert len(pair.heard(RailLost)) == len(pair.heard(RailFenced)) == 1 and len(pair.heard(Hello)) == 1
    assert pair.fabrics[1].counters().over_counts == counted
    assert [fabric.counters().rails_lost for fabric in pair.fabrics] == [1, 1]
    assert pair.sender.counters.peers_lost == pair.receiver.counters.peers_lost == pair.receiver.counters.fences == 0


def test_the_session_goes_on_without_the_rail(pair: TwoRails) -> None:
    pair.fetch()
    pair.cut_in_flight()
    pair.finish()
    before = pair.posted
    pair.fetch("another")
    pair.finish()
    assert len(pair.owner.arrivals) == 2 and pair.posted[1] == before[1]


def test_messages_that_come_twice_change_nothing(scripted: TwoRails) -> None:
    lost = in_doubt(scripted)
    for _ in range(2):
        scripted.receiver.on_rail_lost(lost)
    scripted.finish()
    first, second = scripted.heard(RailFenced)
    assert first == second and not scripted.owner.failures
    scripted.fetch("another")
    assert isinstance(first, RailFenced)
    scripted.sender.on_rail_fenced(first)
    scripted.finish()
    assert len(scripted.owner.arrivals) == 2


def test_a_decode_node_that_does_not_answer_in_time_costs_the_session(scripted: TwoRails) -> None:
    """As where nobody can be asked: it says Hello with a fresh landing, and the rail is avoided."""
    in_doubt(scripted)
    assert not scripted.owner.arrivals
    scripted.wait(RAIL_DEADLINE_S / 2)
    assert scripted.sender.counters.peers_lost == 0
    scripted.wait(RAIL_DEADLINE_S)
    assert scripted.sender.counters.peers_lost == 1 and len(scripted.heard(Hello)) == 2
    scripted.finish()
    assert [failure.code for failure in scripted.owner.failures] == [FailureCode.STALE_PEER]
    before = scripted.posted
    scripted.fetch("again")
    scripted.finish()
    assert len(scripted.owner.arrivals) == 1 and scripted.posted[1] == before[1]
    assert scripted.fabrics[0].gauges().outstanding == 0


def test_a_transfer_in_doubt_is_not_said_to_be_finished(scripted: TwoRails) -> None:
    lost = in_doubt(scripted)
    finished = scripted.sender.counters.finished
    for _ in range(200):
        scripted.sender.on_events(scripted.fabrics[0].progress(0))
        scripted.receiver.on_events(scripted.fabrics[1].progress(0))
    assert scripted.sender.counters.finished == finished and not scripted.owner.arrivals
    scripted.receiver.on_rail_lost(lost)
    scripted.finish()
    assert len(scripted.owner.arrivals) == 1


def test_what_is_aborted_in_doubt_keeps_its_pages_until_a_fence(scripted: TwoRails) -> None:
    """Some of what was posted will never be counted: the landing is fenced as a whole, as ever."""
    lost = in_doubt(scripted)
    scripted.receiver.abort(TransferKey("request", 1, "decode-instance"), None)
    scripted.run_until(lambda: not scripted.sender.transfers)
    scripted.receiver.on_rail_lost(lost)
    scripted.run_until(lambda: scripted.heard(RailFenced))
    assert not scripted.owner.safe
    scripted.wait(10.0)
    assert scripted.owner.safe and scripted.receiver.counters.fences == 1


def test_news_of_a_landing_that_was_fenced_is_too_late(scripted: TwoRails) -> None:
    lost = in_doubt(scripted)
    stale = msgspec.structs.replace(lost, landing=lost.landing + 1)
    scripted.receiver.on_rail_lost(stale)
    scripted.receiver.on_rail_lost(msgspec.structs.replace(lost, instance="somebody else"))
    assert scripted.fabrics[1].counters().rails_lost == 0
    answer = RailFenced(instance="decode-instance", landing=stale.landing, rail=lost.rail, again=[])
    scripted.sender.on_rail_fenced(answer)
    assert scripted.sender.transfers == 1


@pytest.mark.parametrize("remotes", [[1, 5], [1, 1, 31]], ids=str)
def test_rails_that_there_are_none_of_are_not_fenced(scripted: TwoRails, remotes: list[int]) -> None:
    """A peer that asks for them gets no answer."""
    lost = in_doubt(scripted)
    scripted.receiver.on_rail_lost(msgspec.structs.replace(lost, remotes=remotes))
    other = WritesInDoubt(immediate=0, completed=0)
    scripted.receiver.on_rail_lost(msgspec.structs.replace(lost, rail=0, remotes=[7], doubts=[other]))
    scripted.run_until(lambda: True)
    assert not scripted.heard(RailFenced) and scripted.fabrics[1].counters().rails_lost == 0


def test_where_landings_are_closed_for_the_dead_alone_no_rail_is_fenced(seed: int) -> None:
    pair = over_simulated(seed, ForTheDeadAlone)
    pair.receiver.on_rail_lost(in_doubt(pair))
    pair.wait(1.0)
    assert pair.fabrics[1].counters().rails_lost == 0 and not pair.heard(RailFenced)
    pair.close()


def fail_over(pair: TwoRails) -> None:
    """One transfer, of which one rail has failed."""
    pair.fetch(deadline_s=10 * RAILS_AGAIN_S)
    pair.cut_in_flight()
    pair.run_until(lambda: pair.heard(RailFenced), CHUNK)


def test_peers_meet_with_all_their_rails_again_after_a_while(pair: TwoRails) -> None:
    fail_over(pair)
    pair.finish()
    pair.wait(RAILS_AGAIN_S - 1.0)
    assert len(pair.heard(Hello)) == 1 and pair.receiver.counters.fences == 0
    pair.wait(2.0)
    before = pair.posted
    for number in range(3):
        pair.fetch(f"again {number}")
        pair.finish()
    assert len(pair.heard(Hello)) == 2 and pair.posted[1] > before[1]
    assert not pair.owner.failures


def test_while_something_is_under_way_they_do_not_meet_again(pair: TwoRails) -> None:
    fail_over(pair)
    pair.wait(RAILS_AGAIN_S + 1.0)
    assert len(pair.heard(Hello)) == 1
    pair.finish()
    pair.wait(1.0)
    assert len(pair.heard(Hello)) == 2 and not pair.owner.failures
