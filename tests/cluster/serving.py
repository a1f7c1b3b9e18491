"""That both decode nodes serve, whatever happened before."""

from tests.cluster.harness import ProcessCluster
from tests.cluster.oracle import Oracle
from tests.cluster.waiting import eventually

BOTH = ("decode-0", "decode-1")
TOKENS = 12


def expect_both_serve(cluster: ProcessCluster, oracle: Oracle) -> None:
    """Two requests, the second sent while the first is there, are answered by a node each."""
    prompts = [f"prompt {i} for as many nodes as there are" for i in range(2)]
    with cluster.held("stream:tok=1", "router"):
        asked = [cluster.ask(prompt, TOKENS) for prompt in prompts]
        eventually(lambda: set(cluster.decodes_of_last(2)) == {*BOTH}, "each node has one")
    for prompt, exchange in zip(prompts, asked, strict=True):
        with exchange:
            assert exchange.text() == oracle.completion(prompt, TOKENS).text
