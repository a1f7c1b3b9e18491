import resource
from pathlib import Path

import pytest

from deploy import doctor
from deploy.doctor import Finding, Level

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
