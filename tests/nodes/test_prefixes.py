"""Prefixes that either side holds already: what crosses is what is lacking, and no token changes."""

from pathlib import Path

from protocol.messages import FinishReason, Ledger
from protocol.sampling import SamplingParams
from tests.nodes.conftest import open_named
from tests.nodes.pair import Cluster, Shape
from tests.oracle import Oracle

PAGE, LAYERS, NEW = 16, 3, 5
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
