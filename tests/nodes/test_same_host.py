"""Nodes of one host: KV goes through shared memory unless either side has switched it off, and the ledger says so."""

import logging
from pathlib import Path

import pytest

from fabric.api import TransferEngine
from fabric.libfabric import open_engine
from fabric.same_host import SAME_HOST
from tests.nodes.pair import Cluster, OpenFabric, Shape
from tests.nodes.prompts import expect_oracle, prompt_of
from tests.oracle import Oracle


def open_with(prefill: bool, decode: bool) -> OpenFabric:
    """`net`, and beside it the same-host path on the sides that say so."""

    def open_named(name: str) -> TransferEngine:
        return open_engine("net", same_host=prefill if name.startswith("prefill") else decode)

    return open_named


@pytest.mark.parametrize(
    "prefill, decode, provider",
    [(True, True, SAME_HOST), (True, False, "net"), (False, True, "net")],
)
def test_the_ledger_says_by_way_of_what_the_pages_came(
    tiny_model: Path,
    oracle: Oracle,
    prefill: bool,
    decode: bool,
    provider: str,
    seed: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with Cluster(tiny_model, open_with(prefill, decode), Shape()).start() as cluster:
        (end,) = expect_oracle(cluster, oracle, [prompt_of(70, seed)])
        assert (end.ledger.provider, end.ledger.writes) == (provider, 5 * 3)
        statuses = [*(node.status() for node in cluster.prefill), *(node.status() for node in cluster.decode)]
        assert {status.provider for status in statuses} == {"net"}
    for said in ("session opened", "kv arrived"):
        (line,) = [record for record in caplog.records if record.getMessage() == said]
        assert vars(line)["fields"]["provider"] == provider, "so do the logs of both nodes"


@pytest.mark.slow
@pytest.mark.parametrize("prefill, decode", [(2, 1), (1, 2)])
def test_pools_of_several_ranks_are_read_where_they_lie(
    tiny_model: Path, oracle: Oracle, prefill: int, decode: int, seed: int
) -> None:
    with Cluster(tiny_model, open_with(True, True), Shape()) as cluster:
        cluster.add_prefill(shape=Shape(tp=prefill))
        cluster.add_decode(shape=Shape(tp=decode))
        cluster.router.wait_for(lambda nodes: len(nodes) == 2 and all(node.ready for node in nodes.values()))
        (end,) = expect_oracle(cluster, oracle, [prompt_of(70, seed)])
        assert end.ledger.provider == SAME_HOST
