"""Several engines of a node, looked at together."""

from engine.data_parallel import DataParallelEngines
from tests.engine.traces import Harness


def test_their_numbers_add_up_and_their_blocks_are_told_apart() -> None:
    one, other = Harness(num_blocks=8), Harness(num_blocks=12)
    engines = DataParallelEngines([one.engine, other.engine])
    other.engine.reserve(other.make("A", 9, 1, 1))
    assert (engines.pages_total, engines.pages_free) == (20, 17)
    assert {(record["engine"], record["owner"]) for record in engines.ledger() if record["owner"]} == {(1, "A")}
    assert engines.layout == one.engine.layout
    assert engines.max_context == min(one.engine.max_context, other.engine.max_context)


def test_counters_are_added_field_by_field() -> None:
    harnesses = [Harness(num_blocks=8), Harness(num_blocks=8)]
    engines = DataParallelEngines([harness.engine for harness in harnesses])
    for count, harness in enumerate(harnesses, 1):
        harness.engine.counters.tokens = count
    assert engines.counters.tokens == 3 and engines.counters.resets == 0
    assert engines.prefix_counters.queries == 0
