"""SIGTERM lets a node finish what it has; a launcher that is killed takes its whole cluster with it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from deploy.state import ClusterState, read_state
from tests.cluster.exchange import DONE, Exchange, key_of, text_of
from tests.cluster.harness import MODEL, ProcessCluster
from tests.cluster.oracle import Oracle
from tests.cluster.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "the prompt of a request whose node is told to stop; " * 2
LONG_STREAM = 300
GATE = "xfer:layer=1"
UP_S = 200.0
GONE_S = 5.0


def test_a_decode_node_finishes_its_stream_and_takes_nothing_new(cluster: ProcessCluster, oracle: Oracle) -> None:
    """P48 b, MX29: it leaves the router's set first."""
    with cluster.ask(PROMPT, LONG_STREAM, stream=True) as asked:
        events = asked.events()
        first = next(events)
        stopping = cluster.nodes[cluster.decode_of(key_of(first))]
        stopping.process.terminate()
        eventually(lambda: stopping.instance not in usable(cluster), "the router uses it no more")
        with cluster.ask(PROMPT, 8) as other:
            assert other.text() == oracle.completion(PROMPT, 8).text
        rest = list(events)
    assert rest[-1] == DONE
    assert text_of([first, *rest]) == oracle.completion(PROMPT, LONG_STREAM).text
    assert stopping.process.wait() == 0


def test_a_prefill_node_finishes_its_transfer(cluster: ProcessCluster, oracle: Oracle) -> None:
    """P48 c, MX30: told to stop between two layers."""
    stopping = cluster.nodes["prefill-0"]
    with cluster.held(GATE, "prefill-0") as gate:
        asked = cluster.ask(PROMPT, 8)
        gate.reached("prefill-0")
        stopping.process.terminate()
        eventually(lambda: stopping.instance not in usable(cluster), "the router uses it no more")
        gate.release("prefill-0")
        with asked:
            assert asked.text() == oracle.completion(PROMPT, 8).text
    assert stopping.process.wait() == 0


@pytest.mark.timeout(300)
def test_a_cluster_of_kvferry_up_stops_node_by_node_and_dies_with_its_launcher(
    endless_model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """P48: real command lines. A node that is told to stop in the middle of a stream ends with code 0; after a kill -9
    of the launcher nothing of the cluster is left."""
    state = up(endless_model, tmp_path)
    launcher_log = tmp_path / ".kvferry" / "run" / "launcher.log"
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 200, "temperature": 0, "stream": True}
    address = urlsplit(state.endpoint).netloc
    try:
        with Exchange(address, "/v1/completions", json.dumps(body).encode(), {}) as asked:
            events = asked.events()
            first = next(events)
            state.members["decode-0"].send(signal.SIGTERM)
            rest = list(events)
        assert rest[-1] == DONE and text_of([first, *rest]) == oracle.completion(PROMPT, 200).text
        state.members["prefill-0"].send(signal.SIGTERM)
        for name in ("decode-0", "prefill-0"):
            expect_line(launcher_log, f"{name} ended with code 0;")
    finally:
        state.launcher.send(signal.SIGKILL)
    assert all(member.wait(GONE_S) for member in state.members.values())


def up(model: Path, folder: Path) -> ClusterState:
    """`kvferry up`, from `folder`."""
    command = [sys.executable, "-m", "deploy.cli", "up", "--model", str(model), "--port", "0"]
    command += ["--prefill", "1", "--decode", "1", "--page-size", "16"]
    started = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=UP_S,
        check=False,
    )
    assert started.returncode == 0, started.stdout + started.stderr
    state = read_state(folder / ".kvferry" / "run")
    assert state is not None
    return state


def usable(cluster: ProcessCluster) -> set[str]:
    """Instances that the router would send a request to."""
    return {member["instance"] for member in cluster.members() if member["ready"]}


def expect_line(log: Path, text: str) -> None:
    eventually(lambda: text in log.read_text(), f"{log.name} says {text!r}")
