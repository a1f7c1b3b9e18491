"""The decode node: builds nothing, composes everything, and starts and stops it in order.

Threads: one loop for each engine (owns the engine and its admission), the KV messenger's pump (owns fabric and
receiver), the control thread (owns the sockets), the status pages. Each talks to the others by posting calls.

    router --DecodeRequest--> server --> [engine] admission --Fetch--> [pump] receiver --PrefillRequest--> prefill node
    router <--TokenDelta----- server <-- [engine] admission <--KV arrived-- [pump] receiver <== writes == prefill node
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError

from decode_node.admission import Admission
from decode_node.placement import Placement
from decode_node.seat import Seat
from decode_node.server import PrefillLinks
from engine.data_parallel import DataParallelEngines
from engine.engine import Engine
from engine.errors import LoopStopped
from fabric.api import TransferEngine
from kv_messenger.attempts import Fetch
from kv_messenger.memory import EngineMemory
from kv_messenger.peers import Introduction
from kv_messenger.plan import page_advice
from kv_messenger.pump import Pump, as_metrics
from kv_messenger.receiver import Receiver
from kv_messenger.targets import Target
from protocol import PROTOCOL_VERSION
from protocol.channel import ControlThread
from protocol.counts import added
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
    Message,
    NodeStatus,
    RequestEnded,
    Role,
)
from protocol.node_pages import NodeView, node_pages
from protocol.router_link import RouterLink
from protocol.status_http import StatusServer
from protocol.ticket import TransferKey

STOP_S = 5.0
"""For each part of a stop that waits: the engines' current steps, the senders' answers."""

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


class DecodeNode:
    """`engines`, `fabric` and `memory` (each engine's, registered) are handed in ready-made, and owned from then.
    `max_queue`: requests that may wait for pages, in each engine. `cores`: CPUs of the messenger's thread."""

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
        local_prefill: bool = False,
        max_queue: int = 256,
        cores: Collection[int] | None = None,
        debug_pages: bool = False,
    ) -> None:
        self._membership = membership
        self._model = model
        self._engines = DataParallelEngines(engines)
        self._fabric = fabric
        self._gates = gates
        self._local_prefill = local_prefill
        self._seats = [Seat(engine) for engine in engines]
        self._placement = Placement(len(engines))
        self._control = ControlThread(key, membership.instance, self._on_tick)
        self._links = PrefillLinks(self._control)
        layout = self._engines.layout
        self._compatibility = compatibility_digest(model.digest, layout)
        self._receiver = Receiver(
            me=Introduction(membership.instance, membership.name, self._compatibility, layout),
            fabric=fabric,
            targets=[Target(seat, of.pools, of.context) for seat, of in zip(self._seats, memory, strict=True)],
            send=self._links.send,
            hang_up=self._links.hang_up,
            debug=debug_pages,
        )
        self._pump = Pump(fabric, self._receiver, cores)
        self._router = RouterLink(self._control, self.status, self._on_router_message, self._on_router_lost)
        for number, (seat, engine) in enumerate(zip(self._seats, engines, strict=True)):
            seat.take(
                Admission(
                    engine,
                    _FetchOnPump(self._pump, self._receiver),
                    self._reply,
                    gates,
                    instance=membership.instance,
                    name=membership.name,
                    local_prefill=local_prefill,
                    max_queue=max_queue,
                    target=number,
                )
            )
        self._links.deliver_to(self._pump, self._receiver)
        view = NodeView(self.unhealthy, self._unready, self._gauges, self._counters, self._engines.ledger)
        self._pages = StatusServer(membership.host, membership.status_port, node_pages(view))
        self._idle = threading.Event()
        self._draining = False

    # ---- life ----

    def start(self) -> None:
        """Memory is registered: start every thread, then announce the node to the router."""
        self._gates.on_release(self._on_gate_released)
        self._gates.start()
        self._pages.start()
        self._pump.start()
        for seat in self._seats:
            seat.loop.start()
        self._control.start()
        self._control.post(lambda: self._router.dial(self._membership.router))
        if advice := page_advice(self._engines.layout):
            event(log, "pages are small", logging.WARNING, advice=advice)
        event(log, "decode node started", instance=self._membership.instance, status=self._pages.address)

    def drain(self, grace_s: float) -> bool:
        """Take nothing new and wait for what runs. False if some of it was still running at the end."""
        self._idle.clear()
        self._draining = True  # before the engines know: the router is told at once, and the node may be idle, and go
        self._for_each(Admission.start_draining)
        self._tick_engines()
        self._control.post(self._router.announce)
        return self._idle.wait(grace_s)

    def close(self) -> None:
        """In reverse: end the requests and hear from their senders, then close sockets, fabric (which fences) and
        engines. A thread ends only after those that post to it."""
        going = Failure(FailureCode.DRAINING, "the decode node is stopping")
        if self.unhealthy() is None:
            self._end_requests()
            self._pump.call(lambda: self._receiver.stop_all(going))
            self._receiver.wait_idle(STOP_S)
        self._control.close()
        self._pump.close()
        for seat in self._seats:
            seat.loop.stop()
        self._pages.close()
        self._gates.close()
        self._engines.close()

    def _end_requests(self) -> None:
        """An engine that dies or hangs meanwhile is no reason not to close the rest."""
        try:
            ending = [seat.submit(Admission.end_all) for seat in self._seats]
            for each in ending:
                each.result(STOP_S)
        except (CancelledError, LoopStopped, TimeoutError) as error:
            event(log, "requests could not be ended", logging.WARNING, reason=f"{type(error).__name__}: {error}")

    # ---- what others see ----

    def status(self) -> NodeStatus:
        engines, membership = self._engines, self._membership
        return NodeStatus(
            protocol_version=PROTOCOL_VERSION,
            role=Role.DECODE,
            instance=membership.instance,
            name=membership.name,
            control_address="",
            status_address=self._pages.address,
            compatibility=self._compatibility,
            dtype=engines.layout.dtype,
            context=engines.layout.context,
            tokenizer=self._model.tokenizer,
            model=self._model.name,
            provider=self._fabric.provider,
            ready=self.unhealthy() is None,
            draining=self._draining,
            local_prefill=self._local_prefill,
            page_size=engines.layout.page_size,
            pages_total=engines.pages_total,
            pages_free=engines.pages_free,
            pages_quarantined=engines.pages_quarantined,
            running=max(0, self._jobs - self._waiting),
            waiting=self._waiting,
            max_context=engines.max_context,
        )

    def resources(self) -> dict[str, float]:
        """What must be back at its starting number once nothing runs: pages, slots, transfers, fabric objects."""
        return {**self._held(), **as_metrics(self._pump.count())}

    def unhealthy(self) -> str | None:
        """Why this process is of no use any more, or None."""
        for seat in self._seats:
            if not seat.loop.alive:
                return f"engine thread ended: {seat.loop.error}"
        if not self._pump.alive:
            return "KV messenger thread ended"
        return None if self._control.alive else "control thread ended"

    @property
    def _admissions(self) -> list[Admission]:
        return [seat.admission for seat in self._seats]

    @property
    def _jobs(self) -> int:
        return sum(admission.jobs for admission in self._admissions)

    @property
    def _waiting(self) -> int:
        return sum(admission.waiting for admission in self._admissions)

    def _unready(self) -> str | None:
        return None if self._router.registered else "not registered with a router"

    def _gauges(self) -> Mapping[str, float]:
        cached = {"pages_cached": self._engines.pages_cached}
        return {**self._held(), **cached, **as_metrics(self._pump.fabric_gauges)}

    def _held(self) -> Mapping[str, float]:
        engines, receiver = self._engines, self._receiver
        return {
            "pages_total": engines.pages_total,
            "pages_free": engines.pages_free,
            "pages_quarantined": engines.pages_quarantined,
            "requests": self._jobs,
            "requests_waiting": self._waiting,
            "transfers": receiver.transfers,
            "transfer_slots_free": receiver.slots_free,
            "context_slots_free": engines.context_slots_free,
            "peers": receiver.peers,
            "lingering_landings": receiver.lingering_landings,
            "prefill_links": self._links.count,
        }

    def _counters(self) -> Mapping[str, object]:
        return {
            "requests": added([admission.counters for admission in self._admissions]),
            "transfers": self._receiver.counters,
            "control": self._control.counters,
            "engine": self._engines.counters,
            "prefix": self._engines.prefix_counters,
            "fabric": self._pump.fabric_counters,
        }

    # ---- between the threads ----

    def _on_router_message(self, message: DecodeRequest | Abort) -> None:
        match message:
            case DecodeRequest():
                seat = self._seats[self._placement.place(message.request)]
                seat.post(lambda admission: admission.accept(message))
            case Abort():
                self._for_each(lambda admission: admission.abort(message.request, message.choice))

    def _reply(self, message: Message) -> None:
        if isinstance(message, RequestEnded):
            self._placement.leave(message.request)
        self._router.send(message)

    def _for_each(self, call: Callable[[Admission], None]) -> None:
        """Each on its engine's thread."""
        for seat in self._seats:
            seat.post(call)

    def _on_gate_released(self) -> None:
        self._for_each(Admission.on_gate_released)

    def _on_router_lost(self) -> None:
        self._for_each(Admission.abort_all)

    def _on_tick(self) -> None:
        self._router.on_tick()
        self._links.on_tick()
        self._tick_engines()

    def _tick_engines(self) -> None:
        self._for_each(self._tick_engine)

    def _tick_engine(self, admission: Admission) -> None:
        admission.on_tick()
        if all(each.draining and each.jobs == 0 for each in self._admissions):
            self._idle.set()
