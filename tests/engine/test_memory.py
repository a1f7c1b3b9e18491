"""Memory that is left: the machine's, and within the limits of control groups."""

from pathlib import Path

import psutil
import pytest
import torch

from engine.memory import available_memory, cgroup_headrooms


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_a_cpu_has_no_more_than_the_machine() -> None:
    assert 0 < available_memory(torch.device("cpu")) <= psutil.virtual_memory().total


def test_every_limit_from_the_own_group_upwards_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/pod/container\n")
    mount = tmp_path / "cgroup"
    group(mount)
    stat = "anon 50\ninactive_file 100\nactive_file 7\n"
    group(mount / "pod", memory__max="1000\n", memory__current="700\n", memory__stat=stat)
    group(mount / "pod/container", memory__max="max\n", memory__current="600\n", memory__stat=stat)
    assert cgroup_headrooms(own, mount) == [400]


def test_a_container_sees_its_limit_at_the_mount_point(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/../../elsewhere\n")
    group(tmp_path / "cgroup", memory__max="500\n", memory__current="800\n", memory__stat="inactive_file 0\n")
    assert 0 in cgroup_headrooms(own, tmp_path / "cgroup"), "over its limit: nothing is left"


def test_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n")
    folder = tmp_path / "cgroup/memory/job"
    stat = "cache 9\ntotal_inactive_file 20\n"
    group(folder, memory__limit_in_bytes="300\n", memory__usage_in_bytes="120\n", memory__stat=stat)
    assert cgroup_headrooms(own, tmp_path / "cgroup") == [200]


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_headrooms(tmp_path / "none", tmp_path) == []


def test_a_machine_without_limits_has_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.memory.cgroup_headrooms", list)
    assert available_memory(torch.device("cpu")) > 0
