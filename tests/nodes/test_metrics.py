"""What a node shows of itself to Prometheus."""

from pathlib import Path
from urllib.request import urlopen

from protocol.metric_texts import COUNTERS, GAUGES
from tests.nodes.conftest import open_named
from tests.nodes.pair import Cluster, Shape

DEADLINE_S = 30.0


def shown_at(address: str) -> set[str]:
    with urlopen(f"{address}/metrics", timeout=DEADLINE_S) as page:
        lines: list[str] = page.read().decode().splitlines()
    return {line.split(" ", 3)[2] for line in lines if line.startswith("# HELP ")}


def test_every_number_of_both_roles_has_its_text_and_no_text_is_left_over(tiny_model: Path) -> None:
    with Cluster(tiny_model, open_named("net"), Shape()).start() as cluster:
        addresses = [node.status().status_address for node in cluster.prefill]
        addresses += [node.status().status_address for node in cluster.decode]
        shown = {name for address in addresses for name in shown_at(address)}
    assert shown == {f"kvferry_{name}" for name in GAUGES} | {f"kvferry_{name}_total" for name in COUNTERS}
