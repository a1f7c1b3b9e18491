"""A decode node: the real receiver, admission and links around a played engine, and what must hold of its pages."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

from decode_node.admission import Admission
from decode_node.server import PrefillLinks
from engine.engine import Engine
from engine.request import Owner
from kv_messenger.attempts import Arrival, Fetch
from kv_messenger.peers import Introduction
from kv_messenger.pump import Pump
from kv_messenger.receiver import Receiver
from kv_messenger.targets import Target
from protocol.messages import (
    Abort,
    DecodeRequest,
    Failure,
    FailureCode,
    Message,
    PrefillTimes,
    RequestEnded,
    Role,
)
from protocol.ticket import TransferKey
from tests.simulation.books import Tag, tag_of
from tests.simulation.engines import DecodingEngine
from tests.simulation.errors import Violation
from tests.simulation.flights import Flight
from tests.simulation.nodes import MAX_QUEUE, STEP_S, Node, Surroundings
from tests.simulation.schedule import Thread
from tests.simulation.script import PAGE


class _Seat:
    """The messenger's target owner and the source's caller: calls from one thread of a decode node to the other."""

    def __init__(self, node: "SimulatedDecodeNode", lag: float) -> None:
        self._node = node
        self._thread = Thread(node.around.schedule, node.process, lag)
        self._stepping = False

    def post(self, call: Callable[[Admission], None]) -> None:
        self._thread.post(lambda: self._run(call))

    def _run(self, call: Callable[[Admission], None]) -> None:
        call(self._node.admission)
        self._step_soon()

    def _step_soon(self) -> None:
        if self._node.engine.has_work and not self._stepping:
            self._stepping = True
            schedule = self._node.around.schedule
            schedule.after(schedule.within(STEP_S), self._step, self._node.process)

    def _step(self) -> None:
        self._stepping = False
        self._node.admission.on_step(self._node.engine.step())
        self._step_soon()

    def kv_arrived(self, arrival: Arrival) -> None:
        self.post(lambda admission: admission.kv_arrived(arrival))

    def kv_failed(self, key: TransferKey, failure: Failure) -> None:
        self.post(lambda admission: admission.kv_failed(key, failure))

    def pages_safe(self, key: TransferKey) -> None:
        self.post(lambda admission: admission.pages_safe(key))

    def prefill_timed(self, key: TransferKey, times: PrefillTimes) -> None:
        self.post(lambda admission: admission.prefill_timed(key, times))

    def fetch(self, fetch: Fetch) -> None:
        self._node.pump.submit(lambda: self._node.receiver.fetch(fetch))

    def abort(self, key: TransferKey, failure: Failure | None) -> None:
        self._node.pump.submit(lambda: self._node.receiver.abort(key, failure))


class SimulatedDecodeNode(Node):
    role = Role.DECODE

    def __init__(self, around: Surroundings, name: str, incarnation: int) -> None:
        script, clock = around.script, around.schedule.clock
        super().__init__(around, name, incarnation, script.decode_blocks, script.shared[1])
        self.engine = DecodingEngine(self.layout, self.pages, self.contexts, script.decode_blocks * PAGE)
        self.seat = _Seat(self, script.manners.thread_lag)
        self.links = PrefillLinks(self.control, clock, self._probe)
        self.open: Counter[str] = Counter()
        """Requests that came, less those that ended."""
        self.admission = Admission(
            cast(Engine, self.engine),
            self.seat,
            self._reply,
            self.gates,
            instance=self.instance,
            name=name,
            local_prefill=False,
            max_queue=MAX_QUEUE,
            clock=clock,
        )
        self.receiver = Receiver(
            me=Introduction(self.instance, name, "digest", self.layout),
            fabric=self.fabric,
            targets=[Target(self.seat, [self.region], self.context_region)],
            send=self.links.send,
            hang_up=self.links.hang_up,
            debug=script.debug,
            clock=clock,
        )
        self.links.deliver_to(cast(Pump, self.pump), self.receiver)
        self.fabric.on_landing = self._check_landing
        self.pages.on_free = self._check_freed
        self.contexts.on_free = self._check_slot_freed

    def start(self) -> None:
        self.pump.drive(self.fabric, self.receiver)
        super().start()

    @property
    def draining(self) -> bool:
        return self.admission.draining

    def drain(self) -> None:
        self.seat.post(Admission.start_draining)
        self.control.post(self.router.announce)

    def stop(self) -> None:
        going = Failure(FailureCode.DRAINING, "the decode node is stopping")
        self.seat.post(Admission.end_all)
        self.seat.post(lambda _: self.pump.submit(lambda: self.receiver.stop_all(going)))

    @property
    def idle(self) -> bool:
        return self.admission.jobs == 0 and self.receiver.transfers == 0

    # ---- between the threads ----

    def _on_tick(self) -> None:
        self.links.on_tick()
        self.seat.post(Admission.on_tick)

    def _on_router_message(self, message: DecodeRequest | Abort) -> None:
        match message:
            case DecodeRequest():
                self.open[message.request] += 1
                self.seat.post(lambda admission: admission.accept(message))
            case Abort():
                self.seat.post(lambda admission: admission.abort(message.request, message.choice))

    def _on_router_lost(self) -> None:
        self.seat.post(Admission.abort_all)

    def _on_gate_released(self) -> None:
        self.seat.post(Admission.on_gate_released)

    def _reply(self, message: Message) -> None:
        if isinstance(message, RequestEnded):
            self.open[message.request] -= 1
            if self.open[message.request] < 0:
                raise Violation(f"{message.request} ends twice on {self.instance}")
        self.router.send(message)

    def _probe(self, address: str, then: Callable[[bool], None]) -> None:
        schedule = self.around.schedule
        schedule.after(schedule.within(0.01), lambda: then(not self.around.channel.listens(address)), self.process)

    # ---- what must hold ----

    def _check_landing(self, flight: Flight) -> None:
        """It brings the page that belongs there, of an attempt that holds the block and still waits for it."""
        tag = tag_of(int.from_bytes(flight.bytes, "little"))
        if self.contexts.holds(flight.target):
            self._check_context(flight, tag)
            return
        block, layer = self.pages.place(flight.target)
        where = f"{flight.transfer} brings {tag} to block {block}, layer {layer} of {self.instance}"
        owner = self._owner_of(flight.transfer)
        if tag is None or tag.layer != layer:
            raise Violation(f"{where}: not what belongs there")
        if owner is None or self.engine.place_of(owner, tag.page) != block:
            raise Violation(f"{where}, which is not its own, or not any more")

    def _check_context(self, flight: Flight, tag: Tag | None) -> None:
        owner = self.contexts.owner_at(flight.target)
        if tag is None or owner is None or owner != self._owner_of(flight.transfer):
            raise Violation(f"{flight.transfer} brings {tag} to a context slot of {owner} on {self.instance}")

    def _check_slot_freed(self, owner: Owner, address: int) -> None:
        if address in self.around.network.may_land(self.fabric):
            raise Violation(f"a context slot of {owner} on {self.instance} comes free while a peer may write to it")

    def _owner_of(self, name: str) -> Owner | None:
        """None if the transfer is of another instance."""
        key, _, instance = name.rpartition("@")
        request, _, attempt = key.rpartition("#")
        return Owner(request, int(attempt)) if instance == self.instance else None

    def _check_freed(self, owner: Owner, blocks: Sequence[int]) -> None:
        aimed = self.around.network.may_land(self.fabric)
        for block in blocks:
            if not aimed.isdisjoint(self.pages.addresses(block)):
                raise Violation(f"block {block} of {owner} on {self.instance} comes free while a peer may write to it")
