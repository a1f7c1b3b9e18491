"""The decode node: builds nothing, composes everything, and starts and stops it in order.

Threads: the engine loop (owns engine and admission), the KV messenger's pump (owns fabric and receiver), the control
thread (owns the sockets), the status pages. Each talks to the others by posting calls.

    router --DecodeRequest--> server --> [engine] admission --Fetch--> [pump] receiver --PrefillRequest--> prefill node
    router <--TokenDelta----- server <-- [engine] admission <--KV arrived-- [pump] receiver <== writes == prefill node
"""

import logging
import threading
from collections.abc import Mapping, Sequence

from decode_node.admission import Admission
from decode_node.server import PrefillLinks
from engine.engine import Engine
from engine.loop import EngineLoop
from fabric.api import MemoryRegion, TransferEngine
from kv_messenger.attempts import Arrival, Fetch
from kv_messenger.peers import Introduction
from kv_messenger.plan import page_advice
from kv_messenger.pump import Pump, as_metrics
from kv_messenger.receiver import Receiver
from kv_messenger.targets import Target
from protocol import PROTOCOL_VERSION
from protocol.channel import ControlThread
from protocol.curve import ClusterKey
from protocol.digest import ServedModel, compatibility_digest
from protocol.gates import Gates
from protocol.logs import event
from protocol.membership_options import Membership
from protocol.messages import (
    Abort,
    DecodeRequest,
    Failure,
    FailureCode,
    NodeStatus,
    PrefillTimes,
    Role,
)
from protocol.node_pages import NodeView, node_pages
from protocol.router_link import RouterLink
from protocol.status_http import StatusServer
from protocol.ticket import TransferKey

STOP_S = 5.0
"""For each part of a stop that waits: the engine's current step, the senders' answers."""

log = logging.getLogger(__name__)


class _FetchOnPump:
    """Admission's calls, carried to the pump's thread."""

    def __init__(self, pump: Pump, receiver: Receiver) -> None:
        self._pump = pump
        self._receiver = receiver

    def fetch(self, fetch: Fetch) -> None:
        self._pump.submit(lambda: self._receiver.fetch(fetch))

    def abort(self, key: TransferKey, failure: Failure | None) -> None:
        self._pump.submit(lambda: self._receiver.abort(key, failure))


class _AdmissionOnEngine:
    """The receiver's calls, carried to the engine's thread."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self.admission: Admission | None = None

    def kv_arrived(self, arrival: Arrival) -> None:
        self._loop.post(lambda _: self._there().kv_arrived(arrival))

    def kv_failed(self, key: TransferKey, failure: Failure) -> None:
        self._loop.post(lambda _: self._there().kv_failed(key, failure))

    def pages_safe(self, key: TransferKey) -> None:
        self._loop.post(lambda _: self._there().pages_safe(key))

    def prefill_timed(self, key: TransferKey, times: PrefillTimes) -> None:
        self._loop.post(lambda _: self._there().prefill_timed(key, times))

    def _there(self) -> Admission:
        assert self.admission is not None
        return self.admission


class DecodeNode:
    """`engine`, `fabric` and `regions` (the engine's pools, registered, by rank) are handed in ready-made, and owned
    from then."""

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
        local_prefill: bool = False,
        max_queue: int = 256,
        debug_pages: bool = False,
    ) -> None:
        self._membership = membership
        self._model = model
        self._engine = engine
        self._fabric = fabric
        self._gates = gates
        self._local_prefill = local_prefill
        self._loop = EngineLoop(engine, on_step=lambda output: self._admission.on_step(output))
        self._control = ControlThread(key, membership.instance, self._on_tick)
        self._links = PrefillLinks(self._control)
        self._upward = _AdmissionOnEngine(self._loop)
        self._compatibility = compatibility_digest(model.digest, engine.layout)
        self._receiver = Receiver(
            me=Introduction(membership.instance, membership.name, self._compatibility, engine.layout),
            fabric=fabric,
            targets=[Target(tuple(regions))],
            owner=self._upward,
            send=self._links.send,
            hang_up=self._links.hang_up,
            debug=debug_pages,
        )
        self._pump = Pump(fabric, self._receiver)
        self._router = RouterLink(self._control, self.status, self._on_router_message, self._on_router_lost)
        self._admission = Admission(
            engine,
            _FetchOnPump(self._pump, self._receiver),
            self._router.send,
            gates,
            instance=membership.instance,
            name=membership.name,
            provider=fabric.provider,
            local_prefill=local_prefill,
            max_queue=max_queue,
        )
        self._upward.admission = self._admission
        self._links.deliver_to(self._pump, self._receiver)
        view = NodeView(self.unhealthy, self._unready, self._gauges, self._counters, engine.ledger)
        self._pages = StatusServer(membership.host, membership.status_port, node_pages(view))
        self._idle = threading.Event()

    # ---- life ----

    def start(self) -> None:
        """Memory is registered: start every thread, then announce the node to the router."""
        self._gates.on_release(self._on_gate_released)
        self._gates.start()
        self._pages.start()
        self._pump.start()
        self._loop.start()
        self._control.start()
        self._control.post(lambda: self._router.dial(self._membership.router))
        if advice := page_advice(self._engine.layout):
            event(log, "pages are small", logging.WARNING, advice=advice)
        event(log, "decode node started", instance=self._membership.instance, status=self._pages.address)

    def drain(self, grace_s: float) -> bool:
        """Take nothing new and wait for what runs. False if some of it was still running at the end."""
        self._idle.clear()
        self._loop.post(lambda _: self._start_draining())
        self._control.post(self._router.announce)
        return self._idle.wait(grace_s)

    def close(self) -> None:
        """In reverse: end the requests and hear from their senders, then close sockets, fabric (which fences) and
        engine. A thread ends only after those that post to it."""
        going = Failure(FailureCode.DRAINING, "the decode node is stopping")
        if self.unhealthy() is None:
            self._loop.submit(lambda _: self._end_all()).result(STOP_S)
            self._pump.call(lambda: self._receiver.stop_all(going))
            self._receiver.wait_idle(STOP_S)
        self._control.close()
        self._pump.close()
        self._loop.stop()
        self._pages.close()
        self._gates.close()
        self._engine.close()

    # ---- what others see ----

    def status(self) -> NodeStatus:
        engine, membership = self._engine, self._membership
        return NodeStatus(
            protocol_version=PROTOCOL_VERSION,
            role=Role.DECODE,
            instance=membership.instance,
            name=membership.name,
            control_address="",
            status_address=self._pages.address,
            compatibility=self._compatibility,
            tokenizer=self._model.tokenizer,
            model=self._model.name,
            provider=self._fabric.provider,
            ready=self.unhealthy() is None,
            draining=self._admission.draining,
            local_prefill=self._local_prefill,
            page_size=engine.layout.page_size,
            pages_total=engine.pages_total,
            pages_free=engine.pages_free,
            pages_quarantined=engine.pages_quarantined,
            running=max(0, self._admission.jobs - self._admission.waiting),
            waiting=self._admission.waiting,
            max_context=engine.max_context,
        )

    def resources(self) -> dict[str, float]:
        """What must be back at its starting number once nothing runs: pages, slots, transfers, fabric objects."""
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
        engine, receiver = self._engine, self._receiver
        return {
            "pages_total": engine.pages_total,
            "pages_free": engine.pages_free,
            "pages_quarantined": engine.pages_quarantined,
            "requests": self._admission.jobs,
            "requests_waiting": self._admission.waiting,
            "transfers": receiver.transfers,
            "transfer_slots_free": receiver.slots_free,
            "peers": receiver.peers,
            "lingering_landings": receiver.lingering_landings,
            "prefill_links": self._links.count,
        }

    def _counters(self) -> Mapping[str, object]:
        return {
            "requests": self._admission.counters,
            "transfers": self._receiver.counters,
            "control": self._control.counters,
            "engine": self._engine.counters,
            "prefix": self._engine.prefix_counters,
            "fabric": self._pump.fabric_counters,
        }

    # ---- between the threads ----

    def _on_router_message(self, message: DecodeRequest | Abort) -> None:
        match message:
            case DecodeRequest():
                self._loop.post(lambda _: self._admission.accept(message))
            case Abort():
                self._loop.post(lambda _: self._admission.abort(message.request))

    def _on_gate_released(self) -> None:
        self._loop.post(lambda _: self._admission.on_gate_released())

    def _on_router_lost(self) -> None:
        self._loop.post(lambda _: self._admission.abort_all())

    def _on_tick(self) -> None:
        self._router.on_tick()
        self._links.on_tick()
        self._loop.post(lambda _: self._tick_engine())

    def _tick_engine(self) -> None:
        self._admission.on_tick()
        if self._admission.draining and self._admission.jobs == 0:
            self._idle.set()

    def _end_all(self) -> None:
        self._admission.draining = True
        self._admission.abort_all()

    def _start_draining(self) -> None:
        self._admission.draining = True
        self._tick_engine()
