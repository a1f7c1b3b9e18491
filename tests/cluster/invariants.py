"""What must hold whatever happened: pages back, no late write, nobody fallen, books that balance."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.harness import ProcessCluster
from tests.cluster.oracle import Oracle

STARTED = "router_requests_started_total"
ENDED = "router_requests_ended_total"
DISORDER = ("transfers_checksum_errors_total", "fabric_over_counts_total")
NO_DISORDER = [0.0, 0.0]
ALMOST_A_POOL = "y" * 1980


@contextmanager
def invariants(cluster: ProcessCluster, *victims: str) -> Iterator[None]:
    """I2, I3 (as far as checksums show it), I6 and I7, around what happens within. `victims`: may end."""
    pids, before, wrong = cluster.pids(), cluster.metrics("router"), disorder(cluster)
    yield
    cluster.wait_at_rest()
    now, found = cluster.pids(), disorder(cluster)
    others = [name for name in pids if name not in victims]
    assert [now.get(name) for name in others] == [pids[name] for name in others], others
    for name in found:
        assert found[name] == (wrong[name] if now[name] == pids.get(name) else NO_DISORDER), name
    after = cluster.metrics("router")
    assert after[STARTED] - before[STARTED] == ended(after) - ended(before)


def disorder(cluster: ProcessCluster) -> dict[str, list[float]]:
    """Of each node that runs: what it found wrong with KV that arrived, since its start."""
    nodes = {name: cluster.metrics(name) for name in cluster.pids() if name != "router"}
    return {name: [metrics.get(counter, 0.0) for counter in DISORDER] for name, metrics in nodes.items()}


def ended(metrics: dict[str, float]) -> float:
    """Requests, however they ended."""
    return sum(value for name, value in metrics.items() if name.startswith(ENDED))


def expect_poison_whole(cluster: ProcessCluster, oracle: Oracle, decodes: int = 2) -> None:
    """I3: almost every page of every decode node is handed out once more, which checks its poison, and is read."""
    with cluster.held("decode:join", *sorted(name for name, node in cluster.nodes.items() if node.role == "decode")):
        asked = [cluster.ask(ALMOST_A_POOL, 2) for _ in range(decodes)]
    for exchange in asked:
        with exchange:
            assert exchange.text() == oracle.completion(ALMOST_A_POOL, 2).text
    cluster.wait_at_rest()
