import re
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.cluster_api import ClusterApi
from deploy.cluster_spec import ClusterSpec
from deploy.local import ClusterFailed, LocalCluster
from protocol.curve import read_cluster_key
from tests.deploy.conftest import FAKE_PROGRAMS, Faulty, small_cluster


def cluster_of(spec: ClusterSpec, run_dir: Path, said: list[str] | None = None) -> LocalCluster:
    return LocalCluster(spec, run_dir, (said if said is not None else []).append, FAKE_PROGRAMS)


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What `running` says."""
    return []


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, said: list[str]) -> Iterator[LocalCluster]:
    """One for all tests that only look."""
    folder = tmp_path_factory.mktemp("running")
    with cluster_of(small_cluster(folder / "model"), folder / "run", said) as cluster:
        yield cluster


def test_a_started_cluster_has_every_node_ready(running: LocalCluster) -> None:
    with ClusterApi(running.endpoint) as api:
        nodes = api.nodes()
        assert sorted(node.name for node in nodes) == ["decode-0", "decode-1", "prefill-0"]
        assert all(node.ready and node.all_pages_back for node in nodes)
        assert api.model() == "fake"


def test_port_zero_is_answered_with_the_port_it_got(running: LocalCluster, said: list[str]) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d*", running.endpoint)
    assert any(running.endpoint in line for line in said)


@pytest.mark.usefixtures("running")
def test_progress_names_every_node_twice_starting_and_ready(said: list[str]) -> None:
    for name in ("prefill-0", "decode-0", "decode-1"):
        lines = [line for line in said if line.startswith(name)]
        assert [("starting" in line, "ready" in line) for line in lines] == [(True, False), (False, True)]


def test_all_share_a_key_that_only_the_owner_can_read(running: LocalCluster) -> None:
    assert stat.S_IMODE(running.key.stat().st_mode) == 0o600
    read_cluster_key(running.key)


def test_nothing_runs_after_stop_and_the_key_is_gone(spec: ClusterSpec, run_dir: Path) -> None:
    cluster = cluster_of(spec, run_dir)
    cluster.start()
    processes = [child.id for child in cluster.children]
    assert len(processes) == 4
    assert cluster.stop() == []
    assert not any(process.alive for process in processes)
    assert not cluster.key.exists()


@pytest.mark.parametrize("victim", ["router", "prefill_0", "decode_1"])
def test_an_early_death_ends_the_start_and_shows_the_log(faulty: Faulty, run_dir: Path, victim: str) -> None:
    cluster = cluster_of(faulty(**{victim: "die"}), run_dir)
    with pytest.raises(ClusterFailed, match=r"ended with code 3.*\n.*out of memory, for example") as failure:
        cluster.start()
    assert str(failure.value).startswith(victim.replace("_", "-"))
    assert cluster.children == []


def test_one_that_takes_too_long_is_given_up_with_the_option_that_allows_more(spec: ClusterSpec, run_dir: Path) -> None:
    cluster = cluster_of(replace(spec, start_timeout_s=0.0), run_dir)
    with pytest.raises(ClusterFailed, match=r"within 0 s \(--start-timeout\).* busy machine"):
        cluster.start()
    assert cluster.children == []
