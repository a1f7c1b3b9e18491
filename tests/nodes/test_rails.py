"""Nodes with several rails produce the same tokens, share their pages out, and go on when a rail fails."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fabric.libfabric import open_engine
from fabric.rails import Rail
from fabric.simulated import Faults, SimulatedEngine, SimulatedNetwork
from tests.nodes.pair import Cluster, OpenFabric, Shape
from tests.nodes.prompts import expect_oracle, prompt_of
from tests.oracle import Oracle

RAILS = 3
SHAPE = Shape(page_size=16, num_blocks=64)


MOST_UNTIL_CONNECTED = 20
"""Prompts."""


def over_net(seed: int) -> OpenFabric:
    return lambda _: open_engine("net", rails=[Rail(f"127.0.0.{number + 1}") for number in range(RAILS)])


def over_simulation(seed: int) -> OpenFabric:
    network = SimulatedNetwork(seed, Faults(reorder=True, max_delay=40))
    return lambda name: SimulatedEngine(network, name, rails=RAILS)


@pytest.mark.parametrize("kind", [over_net, over_simulation])
def test_tokens_are_the_same_over_several_rails_and_each_carries_its_share(
    tiny_model: Path, oracle: Oracle, kind: Callable[[int], OpenFabric], seed: int
) -> None:
    """Compared once all are connected: until then a provider takes what it is given by those that are."""
    with Cluster(tiny_model, kind(seed), SHAPE).start() as cluster:
        fabric = cluster.fabrics["prefill-0"]
        expect_oracle(cluster, oracle, [prompt_of(length, seed) for length in (2, 17, 100)])
        more = iter(range(seed + 2, seed + 2 + MOST_UNTIL_CONNECTED))
        while not min(before := fabric.writes_by_rail()):
            expect_oracle(cluster, oracle, [prompt_of(100, next(more))])
        expect_oracle(cluster, oracle, [prompt_of(100, seed + 1)])
        shares = [now - then for now, then in zip(fabric.writes_by_rail(), before, strict=True)]
    assert min(shares) >= max(shares) // 2 > 0, (before, shares)


def test_the_writes_of_a_rail_that_fails_move_to_the_others(tiny_model: Path, oracle: Oracle, seed: int) -> None:
    """A failed write may have landed and been counted, or not: the decode node fences its rail and says so, in the same
    attempt, and the rail is out of use from then on."""
    network = SimulatedNetwork(seed, Faults(fail_completion=5))
    with Cluster(tiny_model, lambda name: SimulatedEngine(network, name, rails=RAILS), SHAPE).start() as cluster:
        prefill = cluster.fabrics["prefill-0"]
        (end,) = expect_oracle(cluster, oracle, [prompt_of(100, seed)])
        assert end.ledger.attempts == 1
        before = prefill.writes_by_rail()
        expect_oracle(cluster, oracle, [prompt_of(90, seed + 1)])
        used = [now - then for now, then in zip(prefill.writes_by_rail(), before, strict=True)]
        assert sorted(bool(writes) for writes in used) == [False, True, True]
        assert cluster.prefill[0].transfer_counters.peers_lost == 0
