"""A whole cluster on this machine: a router, P prefill nodes and D decode nodes, each a process of its own.

Life: write a fresh cluster key -> start the router, learn both of its addresses from its output -> start the nodes,
which dial it -> wait until the router sees all of them ready -> ... -> stop the router, then the nodes, each asked
first and killed only past its deadline. A process that dies while the others come up ends the start, with its last
log lines in the error.
"""

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from deploy.cluster_api import ClusterApi, NodeView
from deploy.cluster_spec import PROGRAMS, ClusterSpec, Programs, environment, node_command, router_command
from deploy.process import POLL_S, Child, spawn
from protocol.curve import write_cluster_key

ROUTER_STOP_S = 10.0
NODES_STOP_S = 15.0


class ClusterFailed(RuntimeError):
    """The cluster did not come up; the message says which process, and shows the end of its log."""


class LocalCluster:
    """Used by one thread: the main one, which must outlive it (the processes die with it)."""

    def __init__(
        self, spec: ClusterSpec, run_dir: Path, say: Callable[[str], None], programs: Programs = PROGRAMS
    ) -> None:
        self.spec = spec
        self.run_dir = run_dir
        self.children: list[Child] = []
        self.endpoint = ""
        """Where clients connect, once started."""
        self.nodes_address = ""
        """Where nodes dial, once started."""
        self._say = say
        self._programs = programs

    @property
    def key(self) -> Path:
        return self.run_dir / "cluster.key"

    def start(self) -> None:
        """Start every process and wait until all are ready. On ClusterFailed nothing is left running."""
        try:
            self._start_router()
            self._start_nodes()
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def _start_router(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.key.unlink(missing_ok=True)
        write_cluster_key(self.key)
        router = self._spawn("router", router_command(self.spec, self.key, self._programs))
        deadline = time.monotonic() + self.spec.start_timeout_s
        self.endpoint = self._announced(router, "router listening on ", deadline)
        self.nodes_address = self._announced(router, "nodes dial ", deadline)
        self._say(f"router       {self.endpoint}")

    def _start_nodes(self) -> None:
        for role, name in self.spec.nodes:
            command = node_command(self.spec, role, name, self.nodes_address, self.key, self._programs)
            self._spawn(name, command)
            self._say(f"{name:<12} starting")

    def _spawn(self, name: str, command: list[str]) -> Child:
        child = spawn(name, command, self.run_dir / f"{name}.log", environment())
        self.children.append(child)
        return child

    def _announced(self, child: Child, prefix: str, deadline: float) -> str:
        """Wait for the value that a process prints after `prefix`."""
        while (value := child.value_after(prefix)) is None:
            self._pause(deadline, f"{child.name} did not print {prefix!r}")
        return value

    def _wait_until_ready(self) -> None:
        began = time.monotonic()
        missing = {name for _, name in self.spec.nodes}
        with ClusterApi(self.endpoint) as api:
            while missing or not api.ready():
                for node in _ready_nodes(api):
                    if node.name in missing:
                        missing.discard(node.name)
                        self._say(f"{node.name:<12} {_ready_line(node, time.monotonic() - began)}")
                self._pause(
                    began + self.spec.start_timeout_s, f"not ready: {', '.join(sorted(missing)) or 'the router'}"
                )

    def _pause(self, deadline: float, complaint: str) -> None:
        """Between two looks at the world: fail if a process died or the time is over."""
        for child in self.dead():
            raise ClusterFailed(child.end)
        if time.monotonic() > deadline:
            limit = f"{self.spec.start_timeout_s:g} s (--start-timeout)"
            raise ClusterFailed(
                f"{complaint} within {limit}; see the logs in {self.run_dir}: a slow or busy machine needs more time"
            )
        time.sleep(POLL_S)

    def dead(self) -> list[Child]:
        """The processes that have ended by themselves."""
        return [child for child in self.children if child.exit_code is not None]

    def stop(self) -> list[str]:
        """Stop all that runs: the router first, so that nothing new arrives. Returns whom only SIGKILL could stop."""
        routers, nodes = self.children[:1], self.children[1:]
        killed = _stop(routers, ROUTER_STOP_S) + _stop(nodes, NODES_STOP_S)
        self.children = []
        self.key.unlink(missing_ok=True)
        return killed

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _ready_nodes(api: ClusterApi) -> list[NodeView]:
    try:
        return [node for node in api.nodes() if node.ready]
    except httpx.TransportError:
        return []  # busy starting; the deadline judges


def _ready_line(node: NodeView, seconds: float) -> str:
    return f"ready after {seconds:.1f} s: {node.pages_total} KV pages, provider {node.provider}"


def _stop(children: list[Child], seconds: float) -> list[str]:
    for child in children:
        child.terminate()
    deadline = time.monotonic() + seconds
    return [child.name for child in children if child.finish(deadline)]
