"""The prefill node: builds nothing, composes everything, and starts and stops it in order.

Threads: one loop for each engine (owns it), the KV messenger's pump (owns fabric and sender), the control thread (owns
the sockets), the status pages.

    decode node --PrefillRequest--> server --> [pump] sender --tokens--> [engine] scheduler, forward
                                               [pump] sender <--chunk--- [engine] before each forward
    decode node <== page writes, layer by layer == fabric <--- progress word, one step per layer
"""

import logging
from collections.abc import Collection, Mapping, Sequence

from engine.data_parallel import DataParallelEngines
from engine.engine import Engine
from engine.loop import EngineLoop
from fabric.api import TransferEngine
from kv_messenger.memory import EngineMemory
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
from protocol.messages import Abort, DecodeRequest, Failure, FailureCode, Nack, NodeStatus, Role
from protocol.node_pages import NodeView, node_pages
from protocol.router_link import RouterLink
from protocol.status_http import StatusServer

STOP_S = 5.0
"""For writes in flight to end after their endpoints were closed."""

log = logging.getLogger(__name__)


class PrefillNode:
    """`engines`, `fabric` and `memory` (each engine's, registered) are handed in ready-made and owned from then on.
    `port`: where decode nodes dial, 0 takes any. `max_queue`: prompts that may wait, in each engine.
    `cores`: CPUs of the messenger's thread. `readable`: this process can read the engines' pages."""

    def __init__(
        self,
        membership: Membership,
        key: ClusterKey,
        model: ServedModel,
        engines: Sequence[Engine],
        fabric: TransferEngine,
        memory: Sequence[EngineMemory],
        gates: Gates,
        *,
        port: int = 0,
        max_queue: int = 256,
        cores: Collection[int] | None = None,
        readable: bool = True,
    ) -> None:
        self._membership = membership
        self._model = model
        self._engines = DataParallelEngines(engines)
        self._fabric = fabric
        self._gates = gates
        self._port = port
        self._control_address = ""
        self._loops = [EngineLoop(engine, on_step=lambda output: self._announcer.on_step(output)) for engine in engines]
        self._prefills = [PrefillEngine(loop, max_queue) for loop in self._loops]
        self._control = ControlThread(key, membership.instance, self._on_tick)
        self._peers = DecodePeers(self._control)
        self._sender = Sender(
            instance=membership.instance,
            compatibility=compatibility_digest(model.digest, self._engines.layout),
            layout=self._engines.layout,
            fabric=fabric,
            sources=[
                Source(prefills, engine.progress.address, of.pools, of.context)
                for prefills, engine, of in zip(self._prefills, engines, memory, strict=True)
            ],
            send=self._peers.send,
            gates=gates,
            readable=readable,
        )
        self._pump = Pump(fabric, self._sender, cores)
        for prefills in self._prefills:
            prefills.refuse_through(self._pump)
        self._announcer = ChunkAnnouncer(self._pump, self._sender, gates)
        for engine in engines:
            engine.listener = self._announcer
        self._peers.deliver_to(self._pump, self._sender)
        self._router = RouterLink(self._control, self.status, self._on_router_message, on_lost=lambda: None)
        view = NodeView(self.unhealthy, self._unready, self._gauges, self._counters, self._engines.ledger)
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
        for loop in self._loops:
            loop.start()
        self._control_address = self._peers.bind(f"tcp://{self._membership.host}:{self._port}")
        self._control.start()
        self._control.post(lambda: self._router.dial(self._membership.router))
        if advice := page_advice(self._engines.layout):
            event(log, "pages are small", logging.WARNING, advice=advice)
        event(log, "prefill node started", instance=self._membership.instance, control=self._control_address)

    def drain(self, grace_s: float) -> bool:
        """Take nothing new and wait for the transfers that run. False if some were still running at the end."""
        self._start_draining()
        self._control.post(self._router.announce)
        return self._sender.wait_idle(grace_s)

    def close(self) -> None:
        """In reverse: stop the transfers and tell their decode nodes, then close sockets, engine and fabric. The
        engine waits for the pump before each forward, so it ends first."""
        self._start_draining()
        going = Failure(FailureCode.DRAINING, "the prefill node is stopping")
        if self.unhealthy() is None:
            self._pump.call(lambda: self._sender.stop_all(going))
        self._control.close()
        self._sender.wait_idle(STOP_S)
        for loop in self._loops:
            loop.stop()
        self._pump.close()
        self._pages.close()
        self._gates.close()
        self._engines.close()

    # ---- what others see ----

    def status(self) -> NodeStatus:
        engines, membership = self._engines, self._membership
        return NodeStatus(
            protocol_version=PROTOCOL_VERSION,
            role=Role.PREFILL,
            instance=membership.instance,
            name=membership.name,
            control_address=self._control_address,
            status_address=self._pages.address,
            compatibility=self._sender.compatibility,
            dtype=engines.layout.dtype,
            context=engines.layout.context,
            tokenizer=self._model.tokenizer,
            model=self._model.name,
            provider=self._fabric.provider,
            ready=self.unhealthy() is None,
            draining=any(prefills.draining for prefills in self._prefills),
            local_prefill=False,
            page_size=engines.layout.page_size,
            pages_total=engines.pages_total,
            pages_free=engines.pages_free,
            pages_quarantined=engines.pages_quarantined,
            running=engines.running,
            waiting=engines.waiting + self._sender.waiting,
            max_context=engines.max_context,
        )

    @property
    def transfer_counters(self) -> SenderCounters:
        return self._sender.counters

    def resources(self) -> dict[str, float]:
        """What must be back at its starting number once nothing runs: pages, transfers, fabric objects."""
        return {**self._held(), **as_metrics(self._pump.count())}

    def unhealthy(self) -> str | None:
        """Why this process is of no use any more, or None."""
        for loop in self._loops:
            if not loop.alive:
                return f"engine thread ended: {loop.error}"
        if not self._pump.alive:
            return "KV messenger thread ended"
        return None if self._control.alive else "control thread ended"

    def _unready(self) -> str | None:
        return None if self._router.registered else "not registered with a router"

    def _gauges(self) -> Mapping[str, float]:
        cached = {"pages_cached": self._engines.pages_cached}
        return {**self._held(), **cached, **as_metrics(self._pump.fabric_gauges)}

    def _held(self) -> Mapping[str, float]:
        engines, sender = self._engines, self._sender
        return {
            "pages_total": engines.pages_total,
            "pages_free": engines.pages_free,
            "pages_quarantined": engines.pages_quarantined,
            "prompts_waiting": engines.waiting + sender.waiting,
            "prompts_running": engines.running,
            "context_slots_free": engines.context_slots_free,
            "transfers": sender.transfers,
            "peers": sender.sessions,
        }

    def _counters(self) -> Mapping[str, object]:
        return {
            "transfers": self._sender.counters,
            "control": self._control.counters,
            "peers": self._peers.counters,
            "engine": self._engines.counters,
            "prefix": self._engines.prefix_counters,
            "fabric": self._pump.fabric_counters,
        }

    def _start_draining(self) -> None:
        for prefills in self._prefills:
            prefills.draining = True

    def _on_router_message(self, message: DecodeRequest | Abort) -> None:
        event(log, "not a decode node", logging.WARNING, kind=type(message).__name__)
        self._router.send(Nack(failure=Failure(FailureCode.UNSUPPORTED, "this is a prefill node")))

    def _on_tick(self) -> None:
        self._router.on_tick()
