"""Prefixes that either side holds already: what crosses is what is lacking, and no token changes."""

from pathlib import Path

from protocol.ledger import Ledger
from protocol.messages import FinishReason
from protocol.sampling import SamplingParams
from tests.nodes.conftest import open_named
from tests.nodes.pair import Cluster, Shape
from tests.oracle import Oracle

PAGE, LAYERS, NEW = 16, 3, 5
ONE_TOKEN = SamplingParams(max_new_tokens=1, ignore_eos=True)
FIRST = [5 + (i * 37) % 200 for i in range(50)]


def ask(cluster: Cluster, oracle: Oracle, prompt: list[int]) -> Ledger:
    _, answer = cluster.router.ask(prompt, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    end = answer.result()
    assert end.reason is FinishReason.LENGTH
    assert answer.tokens == oracle.greedy(prompt, NEW)
    cluster.wait_pages_returned()
    return end.ledger


def test_a_decode_node_asks_only_for_the_pages_that_it_lacks(tiny_model: Path) -> None:
    oracle = Oracle(tiny_model)
    with Cluster(tiny_model, open_named("net"), Shape(page_size=PAGE)).start() as cluster:
        assert ask(cluster, oracle, FIRST).writes == 4 * LAYERS
        longer = ask(cluster, oracle, [*FIRST, *range(10, 40)])
        assert longer.writes == 2 * LAYERS, "79 tokens are 5 pages, 3 of them were full before"
        assert longer.prefill_node, "somebody computed the rest"


def test_of_a_prompt_that_is_held_whole_nothing_is_asked(tiny_model: Path) -> None:
    oracle = Oracle(tiny_model)
    with Cluster(tiny_model, open_named("net"), Shape(page_size=PAGE)).start() as cluster:
        ask(cluster, oracle, FIRST[: 2 * PAGE + 1])
        again = ask(cluster, oracle, FIRST[: 2 * PAGE + 1])
        assert (again.writes, again.prefill_node) == (0, "")


def test_a_prefill_node_sends_from_its_cache_what_it_need_not_compute(tiny_model: Path) -> None:
    """The decode node's pool is so small that other prompts drive the first one out of it."""
    oracle = Oracle(tiny_model)
    shape = Shape(page_size=PAGE, num_blocks=64, decode_blocks=6)
    with Cluster(tiny_model, open_named("net"), shape).start() as cluster:
        prompt = FIRST[: 2 * PAGE + 1]
        ask(cluster, oracle, prompt)
        ask(cluster, oracle, [5 + (i * 53 + 7) % 200 for i in range(80)])
        again = ask(cluster, oracle, prompt)
        assert again.writes == 2 * LAYERS
        assert again.prefill_chunks == 1


def test_p38_a_prompt_that_differs_in_the_last_token_of_a_page_shares_only_what_is_equal(tiny_model: Path) -> None:
    oracle, other = Oracle(tiny_model), list(FIRST)
    other[2 * PAGE - 1] += 1
    with Cluster(tiny_model, open_named("net"), Shape(page_size=PAGE)).start() as cluster:
        assert ask(cluster, oracle, FIRST).writes == 4 * LAYERS
        assert ask(cluster, oracle, other).writes == 3 * LAYERS, "of its 4 pages the first is held"
        assert ask(cluster, oracle, FIRST).writes == LAYERS, "its full pages are still there"


def test_p38_what_comes_back_after_many_evictions_on_both_sides_is_right(tiny_model: Path) -> None:
    oracle = Oracle(tiny_model)
    shape = Shape(page_size=PAGE, num_blocks=10, decode_blocks=8)
    with Cluster(tiny_model, open_named("net"), shape).start() as cluster:
        ask(cluster, oracle, FIRST)
        for number in range(20):
            _, answer = cluster.router.ask([5 + (i * 53 + 11 * number) % 200 for i in range(50)], ONE_TOKEN)
            assert answer.result().reason is FinishReason.LENGTH
        assert all(e.prefix_counters.evictions > 20 for engines in cluster.engines.values() for e in engines)
        ask(cluster, oracle, FIRST)
        assert ask(cluster, oracle, FIRST).writes == LAYERS
