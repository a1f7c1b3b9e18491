"""The launcher with the real roles, on a tiny random model: up, asked, down, with the demo's books."""

from pathlib import Path

import pytest

from deploy.asking import ask_all
from deploy.books import answer_problems, page_problems
from deploy.cluster_api import ClusterApi
from deploy.cluster_spec import ClusterSpec
from deploy.leftovers import footprint, leftovers, shm_entries
from deploy.local import LocalCluster
from deploy.prompts import ask
from tests.tiny_model import save_tiny_model

LONG = "a question that takes more than one prefill chunk " * 3


def ignore(line: str) -> None:
    """Progress is not looked at here."""


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_real_cluster_comes_up_keeps_its_books_and_leaves_nothing_behind(tmp_path: Path) -> None:
    shm = shm_entries()
    spec = ClusterSpec(save_tiny_model(tmp_path / "tiny"), decode=1, port=0, page_size=16, max_batch_tokens=64)
    with LocalCluster(spec, tmp_path / "run", ignore) as cluster, ClusterApi(cluster.endpoint) as api:
        nodes = api.nodes()
        assert sorted(node.role for node in nodes) == ["decode", "prefill"]
        assert all(node.provider and node.pages_total > 0 for node in nodes)
        assert page_problems(nodes, ["prefill-0", "decode-0"]) == []
        answers = ask_all(cluster.endpoint, api.model(), [ask("long", LONG), ask("short", "Hi")])
        assert answer_problems(answers) == []
        assert all(answer.ledger is not None and answer.ledger.writes > 0 for answer in answers)
        seen = footprint([child.id.pid for child in cluster.children], shm)
        assert seen.ports
        assert cluster.stop() == []
    assert leftovers(seen) == []
