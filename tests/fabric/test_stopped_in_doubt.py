"""A rail that fails while nobody wants what is on its way over it any more: there is nothing to ask the peer."""

from collections.abc import Callable, Iterator

import pytest

from fabric.api import EndpointFailed, RailInDoubt, WritesEnded, WritesFailed
from tests.fabric.conftest import Fabric, SimulatedFabric
from tests.fabric.party import drive
from tests.fabric.test_rails_in_doubt import IMMEDIATE, LATE, OTHER, Pair

FABRICS: dict[str, Callable[[], Fabric]] = {
    "net": lambda: Fabric("net"),
    "simulated": lambda: SimulatedFabric(LATE),
}


@pytest.fixture(params=FABRICS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    fabric = FABRICS[request.param]()
    yield Pair(fabric)
    fabric.close()


def expect_next_batch_over_the_other_rail(pair: Pair) -> None:
    for party in pair.both:
        party.events.clear()
    before = pair.sender.engine.writes_by_rail()[1]
    pair.target[:] = 0
    pair.receiver.engine.expect(pair.landing, OTHER, pair.count)
    pair.write(OTHER)
    pair.until_moved()
    assert pair.sender.engine.writes_by_rail()[1] == before


def test_a_batch_that_was_cancelled_ends_and_the_endpoint_goes_on(pair: Pair) -> None:
    handle = pair.write()
    pair.turn(pair.sender)
    posted, _ = pair.sender.engine.cancel(handle)
    pair.cut()
    drive(*pair.both, until=lambda: bool(pair.sender.of(WritesEnded)))
    (ended,) = pair.sender.of(WritesEnded)
    assert (ended.posted, ended.cancelled) == (posted, True) and ended.completed < posted
    assert [doubt.completed for doubt in pair.sender.of(RailInDoubt)] == [{}], "nobody needs to be asked"
    assert not any(pair.sender.of(kind) for kind in (EndpointFailed, WritesFailed))
    assert pair.sender.engine.counters().rails_lost == 1 and pair.sender.engine.gauges().outstanding == 0
    expect_next_batch_over_the_other_rail(pair)


def test_beside_one_that_was_cancelled_only_the_other_is_asked_about(pair: Pair) -> None:
    given_up = pair.write(IMMEDIATE, list(range(8)))
    pair.receiver.engine.expect(pair.landing, OTHER, pair.count)
    pair.write(OTHER)
    pair.turn(pair.sender)
    pair.sender.engine.cancel(given_up)
    pair.cut()
    doubt = pair.doubt()
    assert set(doubt.completed) == {OTHER}
    assert pair.resolve(doubt) == [OTHER]
    drive(*pair.both, until=lambda: len(pair.sender.of(WritesEnded)) == 2)
    ended = {event.handle: event for event in pair.sender.of(WritesEnded)}
    assert ended.pop(given_up).cancelled
    (other,) = ended.values()
    assert (other.posted, other.completed, other.error) == (pair.count, pair.count, None)
    assert not pair.sender.of(EndpointFailed)
