"""`python -m router` as a process: what it prints, how it stops, what it refuses at start."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import pytest

from protocol.curve import ClusterKey, read_cluster_key, write_cluster_key
from protocol.digest import tokenizer_digest
from protocol.messages import FinishReason, TokenDelta
from router.__main__ import main
from tests.router.fake_node import FakeNode, Script, node_status, tokens_then_nothing
from tests.router.streaming import COMPLETION

DEADLINE_S = 30.0
HTTP: Any = {"timeout": 10, "trust_env": False, "verify": False}


class RouterProcess:
    """Killed at the end if it still runs."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "router", "--port", "0", "--node-port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self.lines = [self._line(), self._line()]
        self.url = self.lines[0].rpartition(" ")[2]
        self.nodes_address = self.lines[1].rpartition(" ")[2]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self._log.extend(self.process.stderr)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "cluster.key"
    write_cluster_key(path)
    return path


@pytest.fixture
def router(model_folder: Path, key_file: Path) -> Iterator[RouterProcess]:
    with RouterProcess("--model", str(model_folder), "--cluster-key", str(key_file)) as running:
        yield running


def node_of(router: RouterProcess, key: ClusterKey, model: Path, script: Script) -> FakeNode:
    status = node_status("node", tokenizer=tokenizer_digest(model))
    node = FakeNode(router.nodes_address, key, status, script).start()
    assert node.was_acknowledged()
    return node


def refused_soon(router: RouterProcess) -> None:
    """Connects until the router takes no more connections: raises httpx.TransportError then."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        httpx.get(f"{router.url}/health", **HTTP)


def test_it_prints_both_addresses_and_serves_and_sigterm_lets_an_open_stream_finish(
    router: RouterProcess, key_file: Path, model_folder: Path
) -> None:
    assert router.lines[0].startswith("router listening on http://127.0.0.1:")
    assert router.lines[1].startswith("nodes dial tcp://127.0.0.1:")
    url = f"{router.url}/v1/completions"
    with (
        node_of(router, read_cluster_key(key_file), model_folder, tokens_then_nothing([50])) as node,
        httpx.stream("POST", url, json=COMPLETION, **HTTP) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        router.stop()
        with pytest.raises(httpx.TransportError):
            refused_soon(router)
        node.say(TokenDelta(request=node.requests[0].request, index=1, tokens=[51]))
        node.end(node.requests[0], FinishReason.LENGTH)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert router.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize(
    ("model", "key", "reason"),
    [("missing", None, "no tokenizer.json"), (None, "missing", "cannot read the cluster key")],
)
def test_it_refuses_to_start_with_one_clear_line(
    model_folder: Path, key_file: Path, tmp_path: Path, model: str | None, key: str | None, reason: str
) -> None:
    folder = tmp_path / model if model else model_folder
    key_path = tmp_path / key if key else key_file
    command = [sys.executable, "-m", "router", "--model", str(folder), "--cluster-key", str(key_path), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert reason in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_a_taken_port_is_said_so(model_folder: Path, key_file: Path) -> None:
    command = [sys.executable, "-m", "router", "--model", str(model_folder), "--cluster-key", str(key_file), "--port"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command.append(str(taken.getsockname()[1]))
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    said = done.stderr.splitlines()[-1]
    assert all(word in said for word in ("in use", "127.0.0.1", command[-1], "--port 0"))


def test_it_runs_without_torch_and_transformers() -> None:
    program = "import sys, router.__main__; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=DEADLINE_S).returncode == 0


def test_help_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("OpenAI", "--model", "--cluster-key", "example:", "curl"))
    assert "--test-gates" not in text
