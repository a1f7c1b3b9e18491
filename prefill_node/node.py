"""The prefill node: builds nothing, composes everything, and starts and stops it in order.

Threads: the engine loop (owns the engine), the KV messenger's pump (owns fabric and sender), the control thread (owns
the sockets), the status pages.

    decode node --PrefillRequest--> server --> [pump] sender --tokens--> [engine] scheduler, forward
                                               [pump] sender <--chunk--- [engine] before each forward
    decode node <== page writes, layer by layer == fabric <--- progress word, one step per layer
"""

import logging
from collections.abc import Mapping, Sequence

from engine.engine import Engine
from engine.loop import EngineLoop
from fabric.api import MemoryRegion, TransferEngine
from kv_messenger.plan import page_advice
from kv_messenger.pump import Pump, as_metrics
from kv_messenger.sender import Sender, SenderCounters
from kv_messenger.sources import Source
from prefill_node.engine_port import ChunkAnnouncer, PrefillEngine
from prefill_node.server import DecodePeers
from protocol import PROTOCOL_VERSION
from protocol.channel import ControlThread
from protocol.curve import ClusterKey
from protocol.digest import ServedModel, compatibility_digest
from protocol.gates import Gates
from protocol.logs import event
from protocol.membership_options import Membership
from protocol.messages import Abort, DecodeRequest, Failure, FailureCode, NodeStatus, Role
from protocol.node_pages import NodeView, node_pages
from protocol.router_link import RouterLink
from protocol.status_http import StatusServer

STOP_S = 5.0
"""For writes in flight to end after their endpoints were closed."""

log = logging.getLogger(__name__)


class PrefillNode:
    """`engine`, `fabric` and `regions` (the engine's pools, registered, by rank) are handed in ready-made and owned
    from then on. `port`: where decode nodes dial, 0 takes any."""

    def __init__(
        self,
        membership: Membership,
        key: ClusterKey,
        model: ServedModel,
        engine: Engine,
        fabric: TransferEngine,
        regions: Sequence[MemoryRegion],
        gates: Gates,
        *,
        port: int = 0,
        max_queue: int = 256,
        debug_pages: bool = False,
    ) -> None:
        self._membership = membership
        self._model = model
        self._engine = engine
        self._fabric = fabric
        self._gates = gates
        self._port = port
        self._control_address = ""
        self._loop = EngineLoop(engine, on_step=lambda output: self._announcer.on_step(output))
        self._prefills = PrefillEngine(self._loop, max_queue)
        self._control = ControlThread(key, membership.instance, self._on_tick)
        self._peers = DecodePeers(self._control)
        self._sender = Sender(
            instance=membership.instance,
            compatibility=compatibility_digest(model.digest, engine.layout),
            layout=engine.layout,
            fabric=fabric,
            sources=[Source(self._prefills, engine.progress.address, tuple(regions))],
            send=self._peers.send,
            gates=gates,
            debug=debug_pages,
        )
        self._pump = Pump(fabric, self._sender)
        self._prefills.refuse_through(self._pump)
        self._announcer = ChunkAnnouncer(self._pump, self._sender)
        engine.listener = self._announcer
        self._peers.deliver_to(self._pump, self._sender)
        self._router = RouterLink(self._control, self.status, self._on_router_message, on_lost=lambda: None)
        view = NodeView(self.unhealthy, self._unready, self._gauges, self._counters, engine.ledger)
        self._pages = StatusServer(membership.host, membership.status_port, node_pages(view))

    @property
    def control_address(self) -> str:
        return self._control_address

    # ---- life ----

    def start(self) -> None:
        """Memory is registered: bind, start every thread, then announce the node to the router."""
        self._gates.on_release(lambda: self._pump.submit(self._sender.on_gate_released))
        self._gates.start()
        self._pages.start()
        self._pump.start()
        self._loop.start()
        self._control_address = self._peers.bind(f"tcp://{self._membership.host}:{self._port}")
        self._control.start()
        self._control.post(lambda: self._router.dial(self._membership.router))
        if advice := page_advice(self._engine.layout):
            event(log, "pages are small", logging.WARNING, advice=advice)
        event(log, "prefill node started", instance=self._membership.instance, control=self._control_address)

    def drain(self, grace_s: float) -> bool:
        """Take nothing new and wait for the transfers that run. False if some were still running at the end."""
        self._prefills.draining = True
        self._control.post(self._router.announce)
        return self._sender.wait_idle(grace_s)

    def close(self) -> None:
        """In reverse: stop the transfers and tell their decode nodes, then close sockets, engine and fabric. The
        engine waits for the pump before each forward, so it ends first."""
        self._prefills.draining = True
        going = Failure(FailureCode.DRAINING, "the prefill node is stopping")
        if self.unhealthy() is None:
            self._pump.call(lambda: self._sender.stop_all(going))
        self._control.close()
        self._sender.wait_idle(STOP_S)
        self._loop.stop()
        self._pump.close()
        self._pages.close()
        self._gates.close()
        self._engine.close()

    # ---- what others see ----

    def status(self) -> NodeStatus:
        engine, membership = self._engine, self._membership
        return NodeStatus(
            protocol_version=PROTOCOL_VERSION,
            role=Role.PREFILL,
            instance=membership.instance,
            name=membership.name,
            control_address=self._control_address,
            status_address=self._pages.address,
            compatibility=self._sender.compatibility,
            tokenizer=self._model.tokenizer,
            model=self._model.name,
            provider=self._fabric.provider,
            ready=self.unhealthy() is None,
            draining=self._prefills.draining,
            local_prefill=False,
            page_size=engine.layout.page_size,
            pages_total=engine.pages_total,
            pages_free=engine.pages_free,
            pages_quarantined=engine.pages_quarantined,
            running=engine.running,
            waiting=engine.waiting,
            max_context=engine.max_context,
        )

    @property
    def transfer_counters(self) -> SenderCounters:
        return self._sender.counters

    def resources(self) -> dict[str, float]:
        """What must be back at its starting number once nothing runs: pages, transfers, fabric objects."""
        return {**self._held(), **as_metrics(self._pump.count())}

    def unhealthy(self) -> str | None:
        """Why this process is of no use any more, or None."""
        if not self._loop.alive:
            return f"engine thread ended: {self._loop.error}"
        if not self._pump.alive:
            return "KV messenger thread ended"
        return None if self._control.alive else "control thread ended"

    def _unready(self) -> str | None:
        return None if self._router.registered else "not registered with a router"

    def _gauges(self) -> Mapping[str, float]:
        cached = {"pages_cached": self._engine.pages_cached}
        return {**self._held(), **cached, **as_metrics(self._pump.fabric_gauges)}

    def _held(self) -> Mapping[str, float]:
        engine, sender = self._engine, self._sender
        return {
            "pages_total": engine.pages_total,
            "pages_free": engine.pages_free,
            "pages_quarantined": engine.pages_quarantined,
            "prompts_waiting": engine.waiting,
            "prompts_running": engine.running,
            "transfers": sender.transfers,
            "peers": sender.sessions,
        }

    def _counters(self) -> Mapping[str, object]:
        return {
            "transfers": self._sender.counters,
            "control": self._control.counters,
            "peers": self._peers.counters,
            "engine": self._engine.counters,
            "prefix": self._engine.prefix_counters,
            "fabric": self._pump.fabric_counters,
        }

    def _on_router_message(self, message: DecodeRequest | Abort) -> None:
        event(log, "not a decode node", logging.WARNING, kind=type(message).__name__)

    def _on_tick(self) -> None:
        self._router.on_tick()
