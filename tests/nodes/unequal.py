"""Clusters whose sides have pages of different sizes."""

from pathlib import Path

from tests.nodes.pair import Cluster, OpenFabric, Shape

TOKENS = 1024


def cluster_of(model: Path, open_fabric: OpenFabric, source_page: int, target_page: int, chunk: int = 40) -> Cluster:
    source, target = (Shape(page, TOKENS // page, chunk) for page in (source_page, target_page))
    cluster = Cluster(model, open_fabric, target)
    cluster.add_prefill(source)
    return cluster.start(prefill=0)
