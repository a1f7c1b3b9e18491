"""A cluster of real processes that a test may hold, kill, stop and start again, and whose books it may read.

Every node runs in debug mode (freed pages are poisoned, checksums compared on arrival) and has gates. `heal` brings
back whatever a test took away, so that one cluster serves many tests.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from deploy.cluster_spec import environment
from deploy.process import spawn
from protocol.curve import write_cluster_key
from protocol.gates import GateClient
from tests.cluster.exchange import Exchange
from tests.cluster.held_gate import HeldGate
from tests.cluster.node_process import NodeProcess, Role, events_in
from tests.cluster.waiting import DEADLINE_S, eventually

MODEL = "tiny"
PAGE = 16
BLOCKS = 128
STARTING_S = 200.0
"""For the first nodes of a run: what they are forked from reads torch and transformers anew."""
LEDGER = {"X-Kvferry-Ledger": "1"}
_AT_REST = ("transfers", "requests", "prompts_running", "prompts_waiting", "lingering_landings", "pages_quarantined")
_FABRIC_AT_REST = ("outstanding", "armed", "expectations")


@dataclass
class Node:
    """One node of the cluster. `options` are its own, beside those that all have; `process` runs now, or has ended."""

    role: Role
    name: str
    options: tuple[str, ...]
    process: NodeProcess
    gates_path: str

    @property
    def runs(self) -> bool:
        return self.process.exit_code is None

    @property
    def instance(self) -> str | None:
        """None until it has started."""
        started = [line["instance"] for line in self.process.events() if line["event"].endswith("node started")]
        return str(started[0]) if started else None


class ProcessCluster:
    """`start`, then any order of the rest, then `close`."""

    def __init__(self, model: Path, run_dir: Path) -> None:
        self.nodes: dict[str, Node] = {}
        self._model = model
        self._run_dir = run_dir
        self._starts = 0
        self._wanted: list[tuple[Role, str]] = []
        self._options: tuple[str, ...] = ()
        self.key = run_dir / "cluster.key"

    # ---- life ----

    def start(self, prefill: int, decode: int, *options: str) -> None:
        """`options`: of every node."""
        self._options = options
        os.environ.update(environment())
        write_cluster_key(self.key)
        self.start_router("0", "0")
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S, trust_env=False)
        self._wanted = [("prefill", f"prefill-{i}") for i in range(prefill)]
        self._wanted += [("decode", f"decode-{i}") for i in range(decode)]
        self.heal(STARTING_S)

    def start_router(self, port: str, node_port: str) -> None:
        """Returns once it listens."""
        self._starts += 1
        self._router_gates = str(self._run_dir / f"router.{self._starts}.gates")
        command = [sys.executable, "-m", "router", "--model", str(self._model), "--served-model", MODEL]
        command += ["--cluster-key", str(self.key), "--port", port, "--node-port", node_port]
        command += ["--test-gates", self._router_gates]
        self.router = spawn("router", command, self._run_dir / f"router.{self._starts}.log", environment())
        eventually(lambda: self.router.value_after("nodes dial ") is not None, "the router listens")
        self.url = self.router.value_after("router listening on ") or ""
        self.nodes_address = self.router.value_after("nodes dial ") or ""
        self.router_threads_at_start = len(os.listdir(f"/proc/{self.router.id.pid}/task"))

    def restart_router(self) -> None:
        """Killed before; the new one has its addresses."""
        self.start_router(str(urlsplit(self.url).port), str(urlsplit(self.nodes_address).port))

    def kill_router(self) -> None:
        """kill -9, and wait until the kernel has done it."""
        self.router.id.send(signal.SIGKILL)
        self.router.finish(time.monotonic() + DEADLINE_S)

    @contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """SIGSTOP, waited for until every thread stands still, and SIGCONT in the end."""
        pid = self.pids()[name]
        os.kill(pid, signal.SIGSTOP)
        try:
            eventually(lambda: _thread_states(pid) == {"T"}, f"{name} stands still")
            yield
        finally:
            with suppress(ProcessLookupError):  # a test may have killed it
                os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        self.http.close()
        for node in self.nodes.values():
            node.process.kill()
        self.kill_router()

    def add(self, role: Role, name: str, *options: str, script: Path | None = None) -> Node:
        """Starts a process and returns at once. `script`: what its transport does wrong."""
        self._starts += 1
        gates_path = str(self._run_dir / f"{name}.{self._starts}.gates")
        arguments = ["--model", str(self._model), "--name", name, "--threads", "1", "--debug-pages"]
        arguments += ["--router", self.nodes_address, "--cluster-key", str(self.key), "--test-gates", gates_path]
        arguments += ["--num-blocks", str(BLOCKS), "--max-batch-tokens", "64", "--page-size", str(PAGE)]
        # The tests share one cluster: what one of them left in a cache must not spare another one its transfer.
        arguments += ["--no-block-sharing", *self._options, *options]
        process = NodeProcess(role, arguments, self._run_dir / f"{name}.{self._starts}.log", script)
        self.nodes[name] = Node(role, name, options, process, gates_path)
        return self.nodes[name]

    def restart(self, name: str, *options: str) -> Node:
        """A process that ended, again, under its old name."""
        node = self.nodes[name]
        assert not node.runs, f"{name} still runs"
        return self.add(node.role, name, *(options or node.options))

    def replace_prefill(self, *options: str, script: Path | None = None) -> Node:
        """kill -9 of prefill-0 and another process on its port: whoever knew the old one drops it at once."""
        port = self.control_address("prefill-0").rpartition(":")[2]
        self.nodes["prefill-0"].process.kill()
        node = self.add("prefill", "prefill-0", "--port", port, *options, script=script)
        self.wait_ready(node.name)
        return node

    def heal(self, seconds: float = DEADLINE_S) -> None:
        """The router and the nodes of the start run, are ready and idle; nodes that a test added are gone."""
        if self.router.exit_code is not None:
            self.restart_router()
        names = {name for _, name in self._wanted}
        for name in [name for name in self.nodes if name not in names]:
            self.nodes.pop(name).process.kill()
        for role, name in self._wanted:
            if name not in self.nodes or not self.nodes[name].runs:
                self.add(role, name)
        self.wait_ready(*names, seconds=seconds)
        living = {node.instance for node in self.nodes.values()}
        eventually(lambda: {member["instance"] for member in self.members()} == living, "the router forgets the dead")
        self.wait_at_rest()

    # ---- what it says of itself ----

    def members(self) -> list[dict[str, Any]]:
        """As the router sees them. A killed node stays until its heartbeats are missed."""
        return list(self.http.get("/v1/cluster").raise_for_status().json())

    def wait_ready(self, *names: str, seconds: float = DEADLINE_S) -> None:
        """Until the router uses the current process of each."""

        def ready() -> bool:
            for name in names:
                process = self.nodes[name].process
                assert process.exit_code is None, f"{name} has ended: {process.log.read_text()}"
            usable = {member["instance"] for member in self.members() if member["ready"]}
            return all(self.nodes[name].instance in usable for name in names)

        eventually(ready, f"{names} are ready", seconds)

    def wait_forgotten(self, *names: str) -> None:
        """Until the router has missed enough heartbeats of these."""
        eventually(lambda: not {m["name"] for m in self.members()} & {*names}, f"the router has forgotten {names}")

    def pids(self) -> dict[str, int]:
        """Of everything that runs."""
        running = {name: node.process.pid for name, node in self.nodes.items() if node.runs}
        return running if self.router.exit_code is not None else {**running, "router": self.router.id.pid}

    def get(self, name: str, page: str) -> httpx.Response:
        """A status page of a node."""
        return httpx.get(self.status_address(name) + page, timeout=DEADLINE_S, trust_env=False)

    def status_address(self, name: str) -> str:
        """Of a node that the router knows."""
        return str(self._member(name)["status_address"])

    def control_address(self, name: str) -> str:
        """Where decode nodes dial a prefill node."""
        return str(self._member(name)["control_address"])

    def metrics(self, name: str) -> dict[str, float]:
        """Of a node or the router, without their common prefix."""
        answer = self.http.get("/metrics") if name == "router" else self.get(name, "/metrics")
        lines = [line for line in answer.raise_for_status().text.splitlines() if not line.startswith("#")]
        samples = (line.rpartition(" ") for line in lines)
        return {metric.removeprefix("kvferry_"): float(value) for metric, _, value in samples}

    def tokens_received(self) -> int:
        """By the router, so far."""
        return int(self.metrics("router")["router_tokens_total"])

    def page_states(self, name: str) -> list[str]:
        """From the page ledger."""
        return [block["state"] for block in self.get(name, "/debug/pages").json()]

    def page_owners(self, name: str) -> list[str]:
        """One for each page that is not free: the request and, on a prefill node, the decode instance."""
        return [block["owner"] for block in self.get(name, "/debug/pages").json() if block["state"] != "free"]

    def busy(self) -> dict[str, Any]:
        """Whatever is not at rest in the nodes that run, by node."""
        return {name: found for name in self.pids() if (found := self._busy(name))}

    def wait_at_rest(self, seconds: float = DEADLINE_S) -> None:
        """All pages and slots are back, and nothing is open anywhere."""
        eventually(lambda: not self.busy(), "every page and slot is back", seconds)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Of the log of a node's current process, or of the router."""
        return events_in(self.router.log) if name == "router" else self.nodes[name].process.events()

    def requests_in(self, name: str) -> set[str]:
        """The keys of all requests that a log speaks of."""
        return {line["request"] for line in self.events(name) if "request" in line}

    def decode_of(self, key: str) -> str:
        """The node to which the router sent a request first."""
        sent = [line for line in self.events("router") if line["event"] == "request sent" and line["request"] == key]
        return str(sent[0]["decode"])

    def decodes_of_last(self, count: int) -> list[str]:
        """The decode nodes of the last so many requests."""
        sent = [line["decode"] for line in self.events("router") if line["event"] == "request sent"]
        return sent[-count:]

    def prefill_of_last(self) -> str:
        """The prefill node that the last request was to ask first."""
        return str([line["prefill"] for line in self.events("router") if line["event"] == "request sent"][-1])

    # ---- requests and gates ----

    def ask(
        self, prompt: str, max_tokens: int, stream: bool = False, headers: dict[str, str] | None = None
    ) -> Exchange:
        """A greedy completion; sent, not read. The answer carries its ledger."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
        return self.send("/v1/completions", json.dumps(body).encode(), {**LEDGER, **(headers or {})})

    def send(self, path: str, body: bytes, headers: dict[str, str]) -> Exchange:
        return Exchange(urlsplit(self.url).netloc, path, body, headers)

    @contextmanager
    def held(self, gate: str, *names: str) -> Iterator[HeldGate]:
        """Hold a gate in these nodes, or in "router"; released in the end."""
        paths = {name: self._router_gates if name == "router" else self.nodes[name].gates_path for name in names}
        with ExitStack() as stack:
            clients = {name: stack.enter_context(closing(GateClient(path))) for name, path in paths.items()}
            held = HeldGate(gate, clients)
            for client in clients.values():
                client.hold(gate)
            try:
                yield held
            finally:
                held.release_rest()

    def _member(self, name: str) -> dict[str, Any]:
        (member,) = [member for member in self.members() if member["instance"] == self.nodes[name].instance]
        return member

    def _busy(self, name: str) -> dict[str, float]:
        metrics = self.metrics(name)
        if name == "router":
            seen = {m["name"]: 1.0 for m in self.members() if m["in_flight"] or m["running"] or m["waiting"]}
            return {**seen, "running": running} if (running := metrics["router_requests_running"]) else seen
        found = {gauge: value for gauge in _AT_REST if (value := metrics.get(gauge, 0.0))}
        found |= {gauge: value for gauge in _FABRIC_AT_REST if (value := metrics[f"fabric_{gauge}"])}
        missing = metrics["pages_total"] - metrics["pages_free"]
        return {**found, "pages": missing} if missing else found


def _thread_states(pid: int) -> set[str]:
    """As /proc names them."""
    states = set()
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # one that ends meanwhile
            states.add(task.read_text().rpartition(")")[2].split()[0])
    return states
