"""Several rails carry the pages of one engine together, between peers that may have different numbers of them."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.api import Arrived, EndpointFailed, MemoryRegion, PageWrites, RailKey, WritesEnded
from fabric.errors import FabricUnavailable, FabricUsageError
from fabric.faults import Faults
from fabric.immediates import pack
from fabric.landing_address import LandingAddress
from fabric.libfabric import open_engine
from fabric.limits import MAX_RAILS, Limits
from fabric.rails import Rail, lanes
from tests.fabric.conftest import REORDERING, Fabric, SimulatedFabric, each_of
from tests.fabric.party import drive, pages

PAGE = 4096
TRIES = 1000
fabric = each_of({"net": lambda: Fabric("net"), "simulated": lambda: SimulatedFabric(REORDERING)})


class Pair:
    """A sender and a receiver with rails of their own number, over memories of `count` pages."""

    def __init__(self, fabric: Fabric, rails: tuple[int, int], count: int = 64) -> None:
        self.sender, self.receiver = (fabric.party(rails=number) for number in rails)
        self.source, self.source_region = self.sender.memory(count * PAGE)
        self.target, self.target_region = self.receiver.memory(count * PAGE, fill=0)
        self.count = count
        self.landing = self.receiver.engine.open_landing("sender")
        self.sending = self.sender.engine.connect("receiver", self.landing.address)

    def batch(self, immediate: int) -> PageWrites:
        return pages(self.source_region, self.target_region.remote, list(range(self.count)), PAGE, immediate)

    def use_all(self, region: MemoryRegion, rails: Sequence[int]) -> None:
        """Over `net` a rail has its turns once it is connected, and the first one that is takes what there is."""
        for _ in range(TRIES):
            self.sender.events.clear()
            self.sender.engine.write(self.sending, pages(region, self.target_region.remote, [0], PAGE, pack(9, 1)))
            drive(self.sender, self.receiver, until=lambda: bool(self.sender.events))
            if all(self.sender.engine.writes_by_rail()[rail] for rail in rails):
                break
        self.sender.events.clear()

    def move(self) -> None:
        """All pages; the receiver counts exactly that many."""
        self.receiver.engine.expect(self.landing, pack(7, 1), self.count)
        self.sender.engine.write(self.sending, self.batch(pack(7, 1)))
        drive(self.sender, self.receiver, until=lambda: bool(self.sender.events) and bool(self.receiver.events))
        (arrived,), (ended,) = self.receiver.of(Arrived), self.sender.of(WritesEnded)
        assert (arrived.count, ended.posted, ended.completed, ended.error) == (*(self.count,) * 3, None)
        assert np.array_equal(self.source, self.target)


@pytest.mark.parametrize("rails", [(1, 1), (2, 2), (4, 4), (1, 3), (3, 1), (2, 3), (4, 3)], ids=str)
def test_peers_with_any_numbers_of_rails_move_pages(fabric: Fabric, rails: tuple[int, int]) -> None:
    pair = Pair(fabric, rails)
    pair.move()
    assert pair.receiver.engine.gauges().endpoints == 1


@pytest.mark.parametrize("rails", [2, 4])
def test_pages_are_shared_out_over_all_rails(fabric: Fabric, rails: int) -> None:
    pair = Pair(fabric, (rails, rails))
    pair.use_all(pair.source_region, range(rails))
    before = pair.sender.engine.writes_by_rail()
    pair.move()
    shares = [now - then for now, then in zip(pair.sender.engine.writes_by_rail(), before, strict=True)]
    assert sum(shares) == pair.count
    assert max(shares) - min(shares) <= pair.count // 2 // rails, shares


def test_single_pages_take_the_rails_by_turns(fabric: Fabric) -> None:
    """A prompt of one page is one write for each layer: they must not all take the first rail."""
    pair = Pair(fabric, (4, 4), count=1)
    pair.use_all(pair.source_region, range(4))
    before = pair.sender.engine.writes_by_rail()
    for number in range(16):
        pair.receiver.engine.expect(pair.landing, pack(number, 1), 1)
        pair.sender.engine.write(pair.sending, pair.batch(pack(number, 1)))
        arrived = number + 1
        drive(pair.sender, pair.receiver, until=lambda: len(pair.receiver.of(Arrived)) == arrived)  # noqa: B023
    assert min(now - then for now, then in zip(pair.sender.engine.writes_by_rail(), before, strict=True)) >= 2


def test_peers_do_not_all_start_on_the_same_rail(fabric: Fabric) -> None:
    if fabric.provider == "net":
        pytest.skip("a first write leaves by the rail that is connected first")
    sender, receiver = fabric.party(rails=4), fabric.party(rails=4)
    (_, source), (_, target) = sender.memory(PAGE), receiver.memory(PAGE)
    for _ in range(24):
        landing = receiver.engine.open_landing("sender")
        sending = sender.engine.connect("receiver", landing.address)
        sender.engine.write(sending, pages(source, target.remote, [0], PAGE, 1))
    drive(sender, receiver, until=lambda: len(sender.of(WritesEnded)) == 24)
    assert min(sender.engine.writes_by_rail()) >= 1


def test_a_memory_near_some_rails_uses_those_alone(fabric: Fabric) -> None:
    pair = Pair(fabric, (4, 4))
    near = pair.sender.engine.register(pair.source.ctypes.data, pair.source.nbytes, rails=[1, 3])
    pair.use_all(near, [1, 3])
    shares = pair.sender.engine.writes_by_rail()
    assert (shares[0], shares[2]) == (0, 0) and min(shares[1], shares[3]) >= 1
    assert [key.rail for key in near.remote.keys] == [1, 3]


def test_the_fence_closes_every_rail(fabric: Fabric) -> None:
    pair = Pair(fabric, (3, 3))
    pair.move()
    pair.target[:] = 0
    pair.receiver.engine.close_endpoint(pair.landing)
    for _ in range(3):
        pair.sender.engine.write(pair.sending, pair.batch(pack(7, 2)))
    drive(pair.sender, pair.receiver, until=lambda: len(pair.sender.of(WritesEnded)) == 4)
    assert all(event.completed == 0 for event in pair.sender.of(WritesEnded)[1:])
    assert not pair.target.any()


def test_a_rail_that_does_not_connect_is_left_out_and_the_others_carry_all() -> None:
    """Nothing was posted on it, so nothing is in doubt: the sender hears of it in the counters alone."""
    fabric = Fabric("net")
    pair = Pair(fabric, (2, 2))
    sender = fabric.party(Limits(connect_seconds=0.1), rails=2)
    source, region = sender.memory(64 * PAGE)
    nowhere = fabric.party(rails=2)
    gone = LandingAddress.decode(nowhere.engine.open_landing("sender").address)
    there = LandingAddress.decode(pair.landing.address)
    assert gone is not None and there is not None
    nowhere.engine.close()
    fabric.parties.remove(nowhere)
    sending = sender.engine.connect("receiver", LandingAddress((there.rails[0], gone.rails[1])).encode())
    pair.receiver.engine.expect(pair.landing, pack(1, 1), 64)
    sender.engine.write(sending, pages(region, pair.target_region.remote, list(range(64)), PAGE, pack(1, 1)))
    drive(sender, pair.receiver, until=lambda: bool(pair.receiver.events))
    assert np.array_equal(source, pair.target)

    written = 1

    def given_up() -> bool:
        """It is tried as long as there is something to post: always."""
        nonlocal written
        while written - len(sender.of(WritesEnded)) < 8:
            sender.engine.write(sending, pages(region, pair.target_region.remote, [0] * 64, PAGE, 5))
            written += 1
        return sender.engine.counters().rails_lost == 1

    drive(sender, pair.receiver, until=given_up)
    assert sender.engine.writes_by_rail()[1] == 0 and not sender.of(EndpointFailed)
    fabric.close()


def test_a_rail_that_fails_with_writes_on_their_way_is_named_and_the_next_connection_does_without_it() -> None:
    fabric = SimulatedFabric(Faults(fail_completion=3), rails=3)
    pair = Pair(fabric, (3, 3))
    pair.sender.engine.write(pair.sending, pair.batch(1))
    drive(pair.sender, pair.receiver, until=lambda: bool(pair.sender.of(WritesEnded)))
    (failed,) = pair.sender.of(EndpointFailed)
    assert failed.rail is not None
    pair.sender.engine.close_endpoint(pair.sending)
    pair.receiver.engine.close_endpoint(pair.landing)
    before = pair.sender.engine.writes_by_rail()
    landing = pair.receiver.engine.open_landing("sender")
    pair.receiver.engine.expect(landing, pack(7, 2), pair.count)
    again = pair.sender.engine.connect("receiver", landing.address, without=[failed.rail])
    pair.sender.engine.write(again, pair.batch(pack(7, 2)))
    drive(pair.sender, pair.receiver, until=lambda: bool(pair.receiver.of(Arrived)))
    assert np.array_equal(pair.source, pair.target)
    used = [now - then for now, then in zip(pair.sender.engine.writes_by_rail(), before, strict=True)]
    assert used[failed.rail] == 0 and sum(used) == pair.count
    fabric.close()


def test_a_connection_may_do_without_any_rails_but_the_last(fabric: Fabric) -> None:
    pair = Pair(fabric, (3, 3), count=4)
    sending = pair.sender.engine.connect("receiver", pair.landing.address, without=[0, 2])
    pair.sender.engine.write(sending, pair.batch(1))
    drive(pair.sender, pair.receiver, until=lambda: bool(pair.sender.of(WritesEnded)))
    assert pair.sender.engine.writes_by_rail() == [0, 4, 0]
    with pytest.raises(FabricUsageError):
        pair.sender.engine.connect("receiver", pair.landing.address, without=[0, 1, 2])


def test_memory_that_only_avoided_rails_reach_cannot_be_sent(fabric: Fabric) -> None:
    pair = Pair(fabric, (2, 2), count=4)
    near = pair.sender.engine.register(pair.source.ctypes.data, pair.source.nbytes, rails=[1])
    sending = pair.sender.engine.connect("receiver", pair.landing.address, without=[1])
    pair.sender.engine.write(sending, pages(near, pair.target_region.remote, [0], PAGE, 1))
    drive(pair.sender, pair.receiver, until=lambda: bool(pair.sender.of(WritesEnded)))
    assert pair.sender.of(WritesEnded)[0].error is not None and pair.sender.of(EndpointFailed)


@pytest.mark.parametrize("turns", [3, 6, 9])
def test_nothing_lands_on_any_rail_after_a_fence_in_full_flight(fabric: Fabric, turns: int) -> None:
    """The sender goes on as if nothing were; its writes are under way on every rail when the landing closes."""
    pair = Pair(fabric, (3, 3), count=256)
    for number in range(8):
        pair.sender.engine.write(pair.sending, pair.batch(pack(number, 1)))
    for _ in range(turns):
        for party in (pair.sender, pair.receiver):
            party.events += party.engine.progress(0.0)
    pair.receiver.engine.close_endpoint(pair.landing)
    pair.target[:] = 0
    drive(pair.sender, pair.receiver, until=lambda: len(pair.sender.of(WritesEnded)) == 8)
    assert not pair.target.any()


@pytest.mark.parametrize("rails", [[], [2], [-1], [0, 0]], ids=str)
def test_rails_that_there_are_none_of_are_refused(fabric: Fabric, rails: list[int]) -> None:
    party = fabric.party(rails=2)
    data, _ = party.memory(PAGE)
    with pytest.raises(FabricUsageError):
        party.engine.register(data.ctypes.data, PAGE, rails=rails)


def test_a_busy_rail_does_not_keep_another_ranks_pages_waiting() -> None:
    """Two source memories, each near one rail. The peer's landing takes nothing on the first: its cap is full."""
    fabric = Fabric("net")
    sender, receiver = fabric.party(Limits(endpoint_writes=4), rails=2), fabric.party(rails=2)
    source, _ = sender.memory(64 * PAGE)
    _, remote = receiver.memory(64 * PAGE, fill=0)
    near = [sender.engine.register(source.ctypes.data, source.nbytes, rails=[rail]) for rail in range(2)]
    landing = receiver.engine.open_landing("sender")
    sending = sender.engine.connect("receiver", landing.address)
    for region, immediate in ((near[0], 1), (near[1], 2)):
        sender.engine.write(sending, pages(region, remote.remote, list(range(64)), PAGE, immediate))
    drive(sender, receiver, until=lambda: len(sender.of(WritesEnded)) == 2)
    assert sender.engine.writes_by_rail() == [64, 64]
    fabric.close()


def test_a_rail_is_a_nic_that_has_that_name() -> None:
    engine = open_engine("net", rails=[Rail("127.0.0.1", "lo")])
    assert engine.rails == 1
    engine.close()
    with pytest.raises(FabricUnavailable, match="mlx5_0"):
        open_engine("net", rails=[Rail("127.0.0.1", "mlx5_0")])
    with pytest.raises(FabricUnavailable, match="the 32 that work together"):
        open_engine("net", rails=[Rail("127.0.0.1")] * (MAX_RAILS + 1))


@given(st.integers(1, 32), st.integers(1, 32), st.integers(0, 1 << 62))
def test_every_rail_of_ours_has_one_lane_and_the_peers_are_shared_fairly(ours: int, theirs: int, chance: int) -> None:
    keys = [RailKey(rail, rail + 100) for rail in range(theirs)]
    found = lanes(range(ours), keys, chance)
    assert [lane.rail for lane in found] == list(range(ours))
    loads = [sum(lane.remote is key for lane in found) for key in keys]
    assert max(loads) - min(loads) <= 1
    if ours == theirs:
        assert [lane.remote.rail for lane in found] == list(range(ours))


def test_a_single_rail_finds_different_rails_of_different_peers() -> None:
    keys = [RailKey(rail, 0) for rail in range(4)]
    assert {lanes([0], keys, chance)[0].remote.rail for chance in range(8)} == {0, 1, 2, 3}
