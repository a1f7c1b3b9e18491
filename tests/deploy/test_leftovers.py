import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.leftovers import Footprint, footprint, leftovers, shm_entries

LISTENER = (
    "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True);"
    "sys.stdin.read()"
)


def test_a_session_that_ended_leaves_nothing() -> None:
    shm = shm_entries()
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        seen = footprint([process.pid], shm)
        assert seen.ports == {port}
        found = leftovers(seen)
        assert f"process {process.pid} still runs" in found
        assert f"port {port} is still open" in found
        process.kill()
    assert leftovers(seen) == []


def test_a_port_that_another_process_took_over_counts_as_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert leftovers(Footprint(frozenset(), frozenset([port]), shm_entries())) == [f"port {port} is still open"]


def test_a_shared_memory_file_that_was_not_there_before_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of its own: whoever looks at the real one meanwhile, in another test, must find nothing."""
    monkeypatch.setattr("deploy.leftovers.SHM", tmp_path)
    before, path = shm_entries(), tmp_path / "left"
    path.touch()
    assert f"{path} was left behind" in leftovers(Footprint(frozenset(), frozenset(), before))
