import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from deploy import up
from deploy.cluster_api import ClusterApi
from deploy.cluster_spec import ClusterSpec
from deploy.process import POLL_S, ProcessId, start_time
from deploy.state import ClusterState, read_state, write_state
from tests.deploy.conftest import Faulty

DEADLINE_S = 30.0


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture(autouse=True)
def nothing_survives_a_failed_test(run_dir: Path) -> Iterator[None]:
    yield
    up.stop(run_dir, lambda line: None)


def start(spec: ClusterSpec, run_dir: Path, said: list[str]) -> int:
    launcher = [sys.executable, "-m", "tests.deploy.launch_fakes", str(spec.model), str(run_dir)]
    return up.run_background(launcher, run_dir, said.append)


def recorded(run_dir: Path) -> ClusterState:
    state = read_state(run_dir)
    assert state is not None
    return state


def test_up_leaves_a_cluster_and_says_how_to_ask_it_a_second_up_harms_nothing_and_down_ends_it(
    spec: ClusterSpec, run_dir: Path, said: list[str]
) -> None:
    assert start(spec, run_dir, said) == 0
    state = recorded(run_dir)
    with ClusterApi(state.endpoint) as api:
        assert len(api.nodes()) == 3
    assert sorted(state.members) == ["decode-0", "decode-1", "prefill-0", "router"]
    assert_can_be_pasted("\n".join(said), state.endpoint)
    assert start(spec, run_dir, said) == 1
    assert "kvferry down" in said[-1]
    assert recorded(run_dir) == state
    assert up.stop(run_dir, said.append) == 0
    assert not any(process.alive for process in [state.launcher, *state.members.values()])
    assert read_state(run_dir) is None


def assert_can_be_pasted(text: str, endpoint: str) -> None:
    assert f"curl -N {endpoint}/v1/chat/completions" in text
    assert f'OpenAI(base_url="{endpoint}/v1"' in text
    assert '"model": "fake"' in text


def test_a_failed_start_is_reported_with_the_log_and_leaves_nothing(
    faulty: Faulty, run_dir: Path, said: list[str]
) -> None:
    assert start(faulty(decode_1="die"), run_dir, said) == 1
    assert "out of memory, for example" in "\n".join(said)
    assert read_state(run_dir) is None


def test_the_cluster_goes_on_without_a_node_and_the_launcher_says_so_but_not_without_its_router(
    spec: ClusterSpec, run_dir: Path, said: list[str]
) -> None:
    start(spec, run_dir, said)
    state = recorded(run_dir)
    state.members["decode-1"].send(signal.SIGKILL)
    wait_for_line(state.launcher, run_dir / up.LOG, "decode-1 was killed by SIGKILL; its log ends:")
    (line,) = [line for line in (run_dir / up.LOG).read_text().splitlines() if "decode-1 was killed" in line]
    assert datetime.fromisoformat(line.split()[0]).tzinfo is not None
    assert state.launcher.alive
    assert state.members["router"].alive
    state.members["router"].send(signal.SIGKILL)
    assert state.launcher.wait(DEADLINE_S)
    assert not any(process.alive for process in state.members.values())
    assert read_state(run_dir) is None


def test_logs_of_an_earlier_cluster_are_gone_when_another_one_runs(
    spec: ClusterSpec, run_dir: Path, said: list[str]
) -> None:
    run_dir.mkdir()
    for name in ("decode-7.log", "router.log", "launcher.log", "notes.txt"):
        (run_dir / name).write_text("what was said before\n")
    assert start(spec, run_dir, said) == 0
    logs = {log.name: log.read_text() for log in run_dir.glob("*.log")}
    assert sorted(logs) == ["decode-0.log", "decode-1.log", "launcher.log", "prefill-0.log", "router.log"]
    assert "said before" not in "".join(logs.values())
    assert (run_dir / "notes.txt").exists()


def test_no_node_survives_a_launcher_that_was_killed(spec: ClusterSpec, run_dir: Path, said: list[str]) -> None:
    start(spec, run_dir, said)
    state = recorded(run_dir)
    state.launcher.send(signal.SIGKILL)
    for process in [state.launcher, *state.members.values()]:
        assert process.wait(DEADLINE_S)
    assert up.running(run_dir) is None


def test_down_without_a_cluster_is_no_error(run_dir: Path, said: list[str]) -> None:
    assert up.stop(run_dir, said.append) == 0
    (line,) = said
    assert line.startswith("no cluster") and line.endswith(str(run_dir))


def test_down_spares_a_process_that_got_a_recorded_pid(run_dir: Path, said: list[str]) -> None:
    started = start_time(os.getpid())
    assert started is not None
    ours = ProcessId(os.getpid(), started - 1)
    write_state(run_dir, ClusterState(ours, {"decode-0": ours}, "http://127.0.0.1:1", "model"))
    assert up.stop(run_dir, said.append) == 0
    assert read_state(run_dir) is None


def wait_for_line(writer: ProcessId, log: Path, text: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        assert not writer.wait(POLL_S), log.read_text()
