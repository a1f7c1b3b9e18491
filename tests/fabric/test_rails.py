"""Several rails carry the pages of one engine together, between peers that may have different numbers of them."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.api import Arrived, PageWrites, RailKey, WritesEnded
from fabric.errors import FabricUnavailable, FabricUsageError
from fabric.immediates import pack
from fabric.libfabric import open_engine
from fabric.limits import MAX_RAILS, Limits
from fabric.rails import Rail, lanes
from tests.fabric.conftest import REORDERING, Fabric, SimulatedFabric
from tests.fabric.party import drive, pages

PAGE = 4096
FABRICS: dict[str, Callable[[], Fabric]] = {
    "net": lambda: Fabric("net"),
    "simulated": lambda: SimulatedFabric(REORDERING),
}


@pytest.fixture(params=FABRICS)
def fabric(request: pytest.FixtureRequest) -> Fabric:
    opened = FABRICS[request.param]()
    request.addfinalizer(opened.close)
    return opened


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
    pair.move()
    shares = pair.sender.engine.writes_by_rail()
    assert sum(shares) == pair.count
    assert max(shares) - min(shares) <= pair.count // 2 // rails, shares


def test_single_pages_take_the_rails_by_turns(fabric: Fabric) -> None:
    """A prompt of one page is one write for each layer: they must not all take the first rail."""
    pair = Pair(fabric, (4, 4), count=1)
    for number in range(16):
        pair.receiver.engine.expect(pair.landing, pack(number, 1), 1)
        pair.sender.engine.write(pair.sending, pair.batch(pack(number, 1)))
        arrived = number + 1
        drive(pair.sender, pair.receiver, until=lambda: len(pair.receiver.of(Arrived)) == arrived)  # noqa: B023
    assert min(pair.sender.engine.writes_by_rail()) >= 2


def test_peers_do_not_all_start_on_the_same_rail(fabric: Fabric) -> None:
    sender, receiver = fabric.party(rails=4), fabric.party(rails=4)
    (_, source), (_, target) = sender.memory(PAGE), receiver.memory(PAGE)
    for _ in range(24):
        landing = receiver.engine.open_landing("sender")
        sending = sender.engine.connect("receiver", landing.address)
        sender.engine.write(sending, pages(source, target.remote, [0], PAGE, 1))
    drive(sender, receiver, until=lambda: len(sender.of(WritesEnded)) == 24)
    assert min(sender.engine.writes_by_rail()) >= 1


def test_a_memory_near_some_rails_uses_those_alone(fabric: Fabric) -> None:
    sender, receiver = fabric.party(rails=4), fabric.party(rails=4)
    source, _ = sender.memory(8 * PAGE)
    _, remote = receiver.memory(8 * PAGE, fill=0)
    near = sender.engine.register(source.ctypes.data, source.nbytes, rails=[1, 3])
    landing = receiver.engine.open_landing("sender")
    sending = sender.engine.connect("receiver", landing.address)
    sender.engine.write(sending, pages(near, remote.remote, list(range(8)), PAGE, 1))
    drive(sender, receiver, until=lambda: bool(sender.of(WritesEnded)))
    shares = sender.engine.writes_by_rail()
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
    with pytest.raises(FabricUnavailable, match="at most 32"):
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
