"""What a stopped cluster may have left on the machine: processes, listening ports, shared memory."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of a running cluster. `sessions`: one per process that the launcher started. `ports`: TCP, listening."""

    sessions: frozenset[int]
    ports: frozenset[int]
    shm_before: frozenset[str]


def shm_entries() -> frozenset[str]:
    """Our own user's: others come and go meanwhile."""
    mine = os.getuid()
    return frozenset(entry.name for entry in os.scandir(SHM) if entry.stat(follow_symlinks=False).st_uid == mine)


def footprint(sessions: Iterable[int], shm_before: frozenset[str]) -> Footprint:
    """Look while the cluster runs."""
    leaders = frozenset(sessions)
    pids = {pid for pid, session in _sessions() if session in leaders}
    ports = {port for port, pid in _listening() if pid in pids}
    return Footprint(leaders, frozenset(ports), shm_before)


def leftovers(of: Footprint) -> list[str]:
    """Look after it stopped: what is still there, in words."""
    processes = [f"process {pid} still runs" for pid, session in _sessions() if session in of.sessions]
    ports = [f"port {port} is still open" for port, _ in _listening() if port in of.ports]
    shared = [f"{SHM / name} was left behind" for name in sorted(shm_entries() - of.shm_before)]
    return processes + ports + shared


def _sessions() -> list[tuple[int, int]]:
    """(pid, session) of every process."""
    found = []
    for pid in psutil.pids():
        try:
            found.append((pid, os.getsid(pid)))
        except (ProcessLookupError, PermissionError):
            continue  # ended meanwhile, or another user's
    return found


def _listening() -> list[tuple[int, int | None]]:
    """(port, pid) of every listening TCP socket; pid None where it is another user's."""
    connections = psutil.net_connections(kind="tcp")
    return [(c.laddr.port, c.pid) for c in connections if c.status == psutil.CONN_LISTEN and c.laddr]
