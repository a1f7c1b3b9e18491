import resource
from pathlib import Path

import pytest

from deploy import doctor
from deploy.doctor import Finding, Level
from tests.fabric.machines import Tree, dgx_h100

MIB = 1 << 20


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (doctor.check_python((3, 10)), Level.FAIL),
        (doctor.check_python((3, 12)), Level.OK),
        (doctor.check_libfabric("1.17"), Level.WARN),
        (doctor.check_libfabric("1.19"), Level.OK),
        (doctor.check_libfabric("2.0"), Level.OK),
        (doctor.check_providers([]), Level.FAIL),
        (doctor.check_providers(["net", "tcp;ofi_rxm"]), Level.WARN),
        (doctor.check_providers(["efa", "net"]), Level.OK),
        (doctor.check_memlock(8 * MIB, ["net"]), Level.OK),
        (doctor.check_memlock(8 * MIB, ["verbs;ofi_rxm", "net"]), Level.FAIL),
        (doctor.check_memlock(resource.RLIM_INFINITY, ["efa"]), Level.OK),
        (doctor.check_open_files(1024), Level.WARN),
        (doctor.check_open_files(65536), Level.OK),
        (doctor.check_cores(1), Level.WARN),
        (doctor.check_cores(2), Level.OK),
        (doctor.check_memory(512 * MIB), Level.WARN),
        (doctor.check_memory(8192 * MIB), Level.OK),
        (doctor.check_shm(Path("/nonexistent")), Level.FAIL),
    ],
    ids=str,
)
def test_each_finding_has_its_level_and_a_remedy_where_it_is_not_ok(finding: Finding, level: Level) -> None:
    assert finding.level is level
    assert bool(finding.remedy) == (level is not Level.OK)


def test_the_nics_and_cores_of_each_gpu_are_listed(tmp_path: Path) -> None:
    findings = doctor.check_topology(dgx_h100(tmp_path).machine(), range(224))
    assert [finding.subject for finding in findings] == [f"gpu {index}" for index in range(8)]
    assert findings[0].fact == "0000:1b:00.0: mlx5_0 (same PCIe switch), cores 0-13,112-125"
    assert {finding.level for finding in findings} == {Level.OK}


def test_a_gpu_whose_nic_is_on_the_other_socket_is_a_warning(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu("10/10:00.0", 0)
    tree.rdma("mlx5_0", "90/90:00.0", 1)
    (finding,) = doctor.check_topology(tree.machine(), range(2))
    assert finding.level is Level.WARN and finding.remedy
    assert finding.fact == "0000:10:00.0: mlx5_0 (across the system)"


def test_a_failure_makes_the_exit_code_one(capsys: pytest.CaptureFixture[str]) -> None:
    bad = doctor.check_python((3, 10))
    assert doctor.main(False, lambda router_only: [doctor.check_cores(4), bad]) == 1
    shown = capsys.readouterr().out
    assert "fail python" in shown
    assert f"-> {bad.remedy}" in shown


def test_warnings_do_not() -> None:
    assert doctor.main(False, lambda router_only: [doctor.check_cores(1)]) == 0


def test_a_router_needs_neither_torch_nor_libfabric() -> None:
    subjects = {finding.subject for finding in doctor.examine(router_only=True)}
    assert subjects.isdisjoint({"torch", "libfabric", "providers", "memlock"})


def test_this_machine_is_examined_whole() -> None:
    subjects = [finding.subject for finding in doctor.examine(router_only=False)]
    assert len(subjects) == len(set(subjects))
    assert {"python", "cores", "torch", "libfabric", "providers", "memlock", "shm"} <= set(subjects)
    assert set(subjects) & {"nics", "gpu 0"}
