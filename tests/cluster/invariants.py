"""What must hold whatever happened: pages back, no late write, nobody fallen, books that balance."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.harness import ProcessCluster
from tests.cluster.oracle import Oracle

STARTED = "router_requests_started_total"
ENDED = "router_requests_ended_total"
DISORDER = ("transfers_checksum_errors_total", "fabric_over_counts_total")
ALMOST_A_POOL = "y" * 1980


@contextmanager
def invariants(cluster: ProcessCluster, *victims: str) -> Iterator[None]:
    """I2, I3 (as far as checksums show it), I6 and I7, around what happens within. `victims`: may end."""
    pids, before = cluster.pids(), cluster.metrics("router")
    yield
    cluster.wait_at_rest()
    now = cluster.pids()
    assert {name: now.get(name) for name in pids if name not in victims} == {
        name: pid for name, pid in pids.items() if name not in victims
    }
    for name in now.keys() - {"router"}:
        metrics = cluster.metrics(name)
        assert not any(metrics.get(counter) for counter in DISORDER), (name, metrics)
    after = cluster.metrics("router")
    assert after[STARTED] - before[STARTED] == ended(after) - ended(before)


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
