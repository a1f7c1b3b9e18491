"""Sender and receiver of every sharding, over real libfabric and over a network that reorders: bytes, counts, sums."""

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from fabric.api import TransferEngine
from fabric.libfabric import open_engine
from fabric.simulated import Faults, SimulatedEngine, SimulatedNetwork
from kv_messenger.plan import expected
from protocol.context import ContextLayout
from protocol.layout import KVLayout
from tests.kv_messenger.builders import BOTH, LOGITS, TARGET_SLOT
from tests.kv_messenger.layouts import FULL, HYBRID, SLIDING, of
from tests.kv_messenger.pairing import SOURCE_SLOT, Pair, expect_whole

SHARDINGS = {
    "1 to 1": (of(4, 1, 16), of(4, 1, 16)),
    "2 to 1": (of(4, 2, 16), of(4, 1, 16)),
    "1 to 2": (of(4, 1, 16), of(4, 2, 16)),
    "2 to 2": (of(4, 2, 16), of(4, 2, 16)),
    "4 to 2": (of(4, 4, 16), of(4, 2, 16)),
    "2 to 4": (of(4, 2, 16), of(4, 4, 16)),
    "3 to 1": (of(3, 3, 16), of(3, 1, 16)),
    "copies to copies": (of(2, 4, 16), of(2, 8, 16)),
    "copies to one": (of(1, 4, 16), of(1, 1, 16)),
    "latent vectors": (of(1, 2, 16, FULL, 1), of(1, 4, 16, FULL, 1)),
    "16 to 64": (of(4, 1, 16), of(4, 1, 64)),
    "64 to 16": (of(4, 1, 64), of(4, 1, 16)),
    "48 to 64, 4 to 2, hybrid": (of(4, 4, 48, HYBRID), of(4, 2, 64, HYBRID)),
    "2 to 4, sliding": (of(4, 2, 16, SLIDING), of(4, 4, 4, SLIDING)),
}


@pytest.fixture(params=["net", "reordering"])
def open_fabric(request: pytest.FixtureRequest, seed: int) -> Callable[[], TransferEngine]:
    if request.param == "net":
        return lambda: open_engine("net")
    network = SimulatedNetwork(seed, Faults(reorder=True, max_delay=40, busy_share=0.1, busy_burst=3))
    return lambda: SimulatedEngine(network)


@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize("tokens", [1, 70])
def test_kv_arrives_whole_and_nothing_else_does(
    open_fabric: Callable[[], TransferEngine], name: str, tokens: int, seed: int
) -> None:
    source, target = SHARDINGS[name]
    pair = Pair(open_fabric, source, target, tokens, seed=seed)
    pair.fetch()
    pair.run_until(lambda: pair.owner.safe and (pair.owner.arrivals or pair.owner.failures))
    assert not pair.owner.failures
    (arrival,) = pair.owner.arrivals
    assert (arrival.writes, arrival.bytes) == expected(source, target, tokens, 0)
    assert pair.fabrics[1].counters().immediates_counted == arrival.writes
    expect_whole(pair.targets[0], tokens, pair.whole_pages)
    pair.close()


@pytest.mark.parametrize("wanted", [BOTH, ContextLayout((LOGITS,))], ids=["both", "logits"])
@pytest.mark.parametrize("name", ["1 to 1", "4 to 2", "copies to copies", "16 to 64"])
def test_the_context_arrives_with_the_kv(
    open_fabric: Callable[[], TransferEngine], name: str, wanted: ContextLayout, seed: int
) -> None:
    source, target = SHARDINGS[name]
    source, target = replace(source, context=BOTH), replace(target, context=wanted)
    pair = Pair(open_fabric, source, target, 70, seed=seed)
    pair.fetch()
    pair.run_until(lambda: pair.owner.safe and (pair.owner.arrivals or pair.owner.failures))
    assert [(a.writes, a.bytes) for a in pair.owner.arrivals] == [expected(source, target, 70, 0)], pair.owner.failures
    computed, arrived = pair.engines[0].contexts.slots[SOURCE_SLOT], pair.contexts[0].slots
    assert np.array_equal(arrived[TARGET_SLOT], computed[BOTH.slot_bytes - wanted.slot_bytes :])
    assert not np.delete(arrived, TARGET_SLOT, axis=0).any()
    expect_whole(pair.targets[0], 70, pair.whole_pages)
    pair.close()


def test_a_context_that_differs_fails_the_transfer(seed: int) -> None:
    layout = replace(of(4, 1, 16), context=BOTH)
    for part, byte in (("hidden", 5), ("logits", 60)):
        pair = almost_arrived(layout, layout, seed)
        pair.contexts[0].slots[TARGET_SLOT, byte] ^= 1
        assert f"the context's {part} is not its source's" in failure_of(pair)


def answer_to_a_flipped_byte(source: KVLayout, target: KVLayout, rank: int, seed: int) -> str:
    """Planted behind the last write, before the checksums are compared."""
    pair = almost_arrived(source, target, seed)
    pool = pair.targets[0].pools[rank]
    pool[pool.nonzero()[0][0]] ^= 1 << 20
    return failure_of(pair)


def failure_of(pair: Pair) -> str:
    pair.run_until(lambda: pair.owner.arrivals or pair.owner.failures)
    assert not pair.owner.arrivals
    return pair.owner.failures[0].message


def almost_arrived(source: KVLayout, target: KVLayout, seed: int) -> Pair:
    """Every write has landed, and no checksum was compared."""
    network, tokens = SimulatedNetwork(seed, Faults(reorder=True, max_delay=10)), 30
    pair = Pair(lambda: SimulatedEngine(network), source, target, tokens, seed=seed)
    pair.fetch()
    total = expected(source, target, tokens, 0).writes
    landed = pair.fabrics[1].counters
    pair.run_until(lambda: pair.sender.transfers == 0 and landed().immediates_counted == total)
    return pair


@pytest.mark.parametrize("name", ["2 to 4", "copies to copies", "16 to 64", "2 to 4, sliding"])
def test_a_byte_that_differs_on_any_rank_fails_the_transfer(name: str, seed: int) -> None:
    source, target = SHARDINGS[name]
    for rank in range(target.tensor_parallel):
        assert "KV differs on arrival" in answer_to_a_flipped_byte(source, target, rank, seed)


def test_prompts_go_to_the_source_that_is_least_busy_and_into_the_engine_that_asked(
    open_fabric: Callable[[], TransferEngine], seed: int
) -> None:
    """TP on the prefill side, two engines with requests of their own on the decode side."""
    pair = Pair(open_fabric, of(4, 2, 16), of(4, 1, 16), 40, engines=(2, 2), seed=seed)
    for number in range(2):
        pair.fetch(f"request {number}", target=number)
    pair.run_until(lambda: len(pair.owner.arrivals) == 2)
    assert not pair.owner.failures
    assert [len(engine.released) for engine in pair.engines] == [1, 1]
    for side in pair.targets:
        expect_whole(side, 40, pair.whole_pages)
    pair.close()


def test_layouts_that_do_not_fit_are_refused_with_the_reason_and_nothing_is_written(seed: int) -> None:
    network = SimulatedNetwork(seed)

    def refusal(source: KVLayout, target: KVLayout) -> str:
        pair = Pair(lambda: SimulatedEngine(network), source, target, 20)
        pair.fetch()
        pair.run_until(lambda: pair.owner.failures)
        assert len(pair.owner.safe) == 1 and not pair.owner.arrivals
        return pair.owner.failures[0].message

    assert "kv_heads of the KV differ" in refusal(of(4, 1, 16), of(8, 1, 16))
    assert "parts of the KV differ" in refusal(of(1, 1, 16), of(1, 1, 16, FULL, 1))
    assert "--context hidden,logits" in refusal(of(1, 1, 16), replace(of(1, 1, 16), context=BOTH))
