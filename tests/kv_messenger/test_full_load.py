"""Hundreds of transfers in flight at once through one sender; and decode nodes that stand still among others."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from bench.peers.orders import Child
from bench.stall import RECEIVERS, star
from fabric.api import TransferEngine
from fabric.libfabric import open_engine
from fabric.limits import Limits
from fabric.simulated import Faults, SimulatedEngine, SimulatedNetwork
from kv_messenger.sent import engine_id
from tests.kv_messenger.crowd import Crowd, Wants

EACH, NODES = 80, 4
CAP = Limits().endpoint_writes


def opener(provider: str) -> Callable[[], TransferEngine]:
    if provider != "reordering":
        return lambda: open_engine(provider)
    network = SimulatedNetwork(20261130, Faults(reorder=True, max_delay=40))
    return lambda: SimulatedEngine(network)


@pytest.fixture(params=["net", "same-host", "reordering"])
def crowd(request: pytest.FixtureRequest) -> Iterator[Crowd]:
    """With room in the source for all that they want, whoever wants it."""
    opened = Crowd(opener(str(request.param)), NODES, EACH, room=2 * EACH * NODES)
    yield opened
    opened.close()


def outcomes(want: Wants) -> tuple[int, int, int]:
    """Transfers that have arrived, that have failed, and whose pages are safe."""
    owner = want.owner
    return len(owner.arrivals), len(owner.failures), len(owner.safe)


def test_hundreds_of_transfers_in_flight_have_one_outcome_each_and_leave_nothing(crowd: Crowd) -> None:
    """All are armed on one word, and a third of them is cancelled before it moves."""
    keys = [[want.fetch() for _ in range(EACH)] for want in crowd.wants]
    crowd.run_until(lambda: len(crowd.engine.submitted) == EACH * NODES)
    crowd.announce(crowd.engine.submitted)
    assert crowd.sender.transfers == EACH * NODES and crowd.fabric.gauges().armed > EACH * NODES
    cancelled = EACH // 3
    for want, of_want in zip(crowd.wants, keys, strict=True):
        for key in of_want[:cancelled]:
            want.receiver.abort(key, None)
    crowd.turn()
    crowd.word.value += 3
    crowd.sender.on_forward_ended(crowd.engine.submitted, 1, 2)
    crowd.run_until(lambda: crowd.at_rest)
    assert [outcomes(want) for want in crowd.wants] == [(EACH - cancelled, 0, EACH)] * NODES
    assert all(Counter(want.owner.safe) == Counter(of) for want, of in zip(crowd.wants, keys, strict=True))
    assert sorted(crowd.engine.released) == sorted(engine_id(key) for of_want in keys for key in of_want)
    assert (crowd.sender.counters.finished, crowd.sender.counters.stopped) == (
        NODES * (EACH - cancelled),
        NODES * cancelled,
    )


@pytest.mark.parametrize("crowd", ["net", "same-host"], indirect=True)
def test_one_that_stands_still_has_at_most_its_cap_on_the_way_and_the_others_get_everything(crowd: Crowd) -> None:
    """Then it is given up, and what it pinned is released."""
    still, *others = crowd.wants
    for want in crowd.wants:
        want.fetch()
    crowd.run_until(lambda: len(crowd.engine.submitted) == NODES)
    crowd.compute_all()
    crowd.run_until(lambda: crowd.at_rest)
    for want in crowd.wants:
        for _ in range(EACH - 1):
            want.fetch()
    crowd.run_until(lambda: len(crowd.engine.submitted) == NODES * (EACH - 1))
    still.stands_still = True
    crowd.compute_all()
    crowd.run_until(lambda: all(outcomes(want) == (EACH, 0, EACH) for want in others))
    crowd.run_until(lambda: crowd.sender.transfers <= EACH)
    assert 0 < crowd.fabric.gauges().outstanding <= CAP
    assert crowd.sender.transfers > 0
    crowd.give_up(still)
    crowd.turn()
    assert (crowd.sender.transfers, crowd.fabric.gauges().outstanding, crowd.sender.sessions) == (0, 0, NODES - 1)


def _wait_arrivals(decodes: Sequence[Child], wanted: int) -> None:
    """At each of them."""
    while min(decode.ask(do="count")["arrived"] for decode in decodes) < wanted:
        pass


@pytest.mark.parametrize("provider", ["net", pytest.param("same-host", marks=pytest.mark.slow)])
def test_a_stopped_process_holds_back_nobody(provider: str) -> None:
    """SIGSTOP: what is on its way to it is never more than an endpoint's cap, and the transfers to the others go on
    all the time; in the end nothing is left."""
    with star(provider, in_flight=4) as processes:
        stopped, *living = processes.decodes
        with processes.loaded(0):
            _wait_arrivals(processes.decodes, 4)
            stopped.pause()
            arrived = [decode.ask(do="count")["arrived"] for decode in living]
            _wait_arrivals(living, max(arrived) + 30)
            for decode in living:
                decode.ask(do="end")
            while (count := processes.prefill.ask(do="count"))["transfers"] > 4:
                pass
            assert count["outstanding"] <= CAP
            stopped.go_on()
        while (count := processes.prefill.ask(do="count"))["transfers"]:
            pass
        assert count["outstanding"] == 0, json.dumps(count)
        assert [decode.ask(do="take")["failed"] for decode in living] == [0] * (RECEIVERS - 1)
