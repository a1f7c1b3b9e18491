"""Prefill and decode nodes in this process, over any fabric, with a router stub in front."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from decode_node.node import DecodeNode
from engine.build import build_engines
from engine.config import ContinuousBatchingConfig, SchedulerType
from engine.engine import Engine
from engine.options import EngineOptions
from fabric.api import TransferEngine
from kv_messenger.memory import EngineMemory, register
from prefill_node.node import PrefillNode
from protocol.context import ContextName
from protocol.curve import ClusterKey, new_cluster_key
from protocol.digest import served_model
from protocol.gates import Gates
from protocol.membership_options import Membership
from protocol.messages import NodeStatus
from tests.nodes.router_stub import RouterStub

PAUSE_LIMIT_S = 60.0

OpenFabric = Callable[[str], TransferEngine]
"""label -> a fabric of its own"""


@dataclass(frozen=True)
class Shape:
    """The engine's sizes on each side."""

    page_size: int = 16
    num_blocks: int = 64
    max_batch_tokens: int = 64
    decode_blocks: int | None = None
    tp: int = 1
    dp: int = 1
    context: tuple[ContextName, ...] = ()

    def options(self, model: Path, blocks: int, scheduler: SchedulerType = "fifo") -> EngineOptions:
        batching = ContinuousBatchingConfig(
            page_size=self.page_size,
            num_blocks=blocks,
            max_batch_tokens=self.max_batch_tokens,
            max_requests_per_batch=min(16, self.max_batch_tokens),
            scheduler_type=scheduler,
            debug_pages=True,
        )
        return EngineOptions(model=model, batching=batching, threads=1, tp=self.tp, context=self.context)


class Cluster:
    """One router stub and the nodes started on it, in debug mode: pages poisoned, checksums compared."""

    def __init__(self, model: Path, open_fabric: OpenFabric, shape: Shape, gates: Path | None = None) -> None:
        self.model = model
        self.shape = shape
        self._open_fabric = open_fabric
        self._gates = gates
        self._key: ClusterKey = new_cluster_key()
        self._stack = ExitStack()
        self.router = RouterStub(self._key)
        self._stack.callback(self.router.close)
        self.prefill: list[PrefillNode] = []
        self.decode: list[DecodeNode] = []
        self.fabrics: dict[str, TransferEngine] = {}
        self.engines: dict[str, list[Engine]] = {}
        self.shapes: dict[str, Shape] = {}

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, prefill: int = 1, decode: int = 1, local: bool = False) -> "Cluster":
        for _ in range(prefill):
            self.add_prefill()
        for _ in range(decode):
            self.add_decode(local)
        started = len(self.prefill) + len(self.decode)
        self.router.wait_for(lambda nodes: len(nodes) == started and all(node.ready for node in nodes.values()))
        return self

    def add_prefill(self, shape: Shape | None = None, model: Path | None = None) -> PrefillNode:
        name = f"prefill-{len(self.prefill)}"
        model = model or self.model
        shape = self.shapes[name] = shape or self.shape
        options = shape.options(model, shape.num_blocks, "prefill_first")
        engines, fabric, memory = self._build(name, options, shape.dp, head=False)
        member, gate = self._member(name), self._gate(name)
        node = PrefillNode(member, self._key, served_model(model), engines, fabric, memory, gate)
        node.start()
        self._stack.callback(node.close)
        self.prefill.append(node)
        return node

    def add_decode(self, local: bool = False, shape: Shape | None = None) -> DecodeNode:
        name = f"decode-{len(self.decode)}"
        shape = self.shapes[name] = shape or self.shape
        options = shape.options(self.model, shape.decode_blocks or shape.num_blocks)
        engines, fabric, memory = self._build(name, options, shape.dp, head=True)
        node = DecodeNode(
            self._member(name), self._key, served_model(self.model), engines, fabric, memory, self._gate(name),
            local_prefill=local, debug_pages=True,
        )  # fmt: skip
        node.start()
        self._stack.callback(node.close)
        self.decode.append(node)
        return node

    def wait_pages_returned(self) -> None:
        """Every page of every node is free again. Looked at with every NodeStatus, in the nodes themselves: what a
        router was told last may be older than what was asked since."""
        nodes: list[PrefillNode | DecodeNode] = [*self.prefill, *self.decode]
        self.router.wait_for(lambda _: all(_at_rest(node.status()) for node in nodes))

    def wait_at_rest(self) -> None:
        """Nothing is open anywhere. Looked at with every NodeStatus, as pages are."""
        passing = ("transfers", "fabric_armed", "fabric_outstanding", "fabric_expectations")
        self.router.wait_for(lambda _: not any(held.get(name) for held in self.resources() for name in passing))

    def resources(self) -> list[dict[str, float]]:
        """Of every node: what must be back at its starting number once nothing runs."""
        return [node.resources() for node in self.prefill] + [node.resources() for node in self.decode]

    def _build(
        self, name: str, options: EngineOptions, dp: int, head: bool
    ) -> tuple[list[Engine], TransferEngine, list[EngineMemory]]:
        """Engines, a fabric, and what of the engines is registered with it."""
        engines = self.engines[name] = build_engines(options, head, dp)
        fabric = self.fabrics[name] = self._open_fabric(name)
        return engines, fabric, [register(fabric, engine.pools, engine.context_memory) for engine in engines]

    def _gate(self, name: str) -> Gates:
        return Gates(str(self._gates / name) if self._gates else None)

    def _member(self, name: str) -> Membership:
        return Membership(
            router=self.router.address,
            cluster_key=Path("unused"),
            name=name,
            host="127.0.0.1",
            provider=None,
            same_host=True,
            status_port=0,
            test_gates=None,
            instance=f"{name}-{id(self):x}",
            max_queue=256,
            drain_s=5.0,
        )


@contextmanager
def messenger_paused(node: PrefillNode | DecodeNode) -> Iterator[None]:
    """The node's messenger stands still inside this block: it posts nothing more, and answers nobody."""
    paused, go_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        paused.set()
        assert go_on.wait(PAUSE_LIMIT_S), "paused for too long"

    node._pump.submit(stand_still)
    try:
        assert paused.wait(PAUSE_LIMIT_S), "the messenger does not run"
        yield
    finally:
        go_on.set()


def blocks_of(node: DecodeNode, owner: str, attempt: int = 1) -> dict[int, str]:
    """block -> state, of every block that this attempt has by the node's page ledger."""
    with urlopen(f"{node.status().status_address}/debug/pages", timeout=PAUSE_LIMIT_S) as answer:
        records = json.load(answer)
    return {r["block"]: r["state"] for r in records if (r["owner"], r["generation"]) == (owner, attempt)}


def _at_rest(node: NodeStatus) -> bool:
    return node.pages_free == node.pages_total and node.pages_quarantined == 0
