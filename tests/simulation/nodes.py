"""Both kinds of nodes, put together as `prefill_node.node` and `decode_node.node` do it, but for threads and sockets:
everything that decides anything is what real nodes run."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from decode_node.admission import Admission
from decode_node.server import PrefillLinks
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.outputs import PrefillChunk
from engine.progress import ProgressWord
from engine.request import Owner, Request
from fabric.api import MemoryRegion
from kv_messenger.attempts import Arrival, Fetch
from kv_messenger.peers import Introduction
from kv_messenger.pump import TICK_S, Pump, PumpOwner
from kv_messenger.receiver import Receiver
from kv_messenger.sender import Sender
from kv_messenger.sent import engine_id
from kv_messenger.sources import Source
from kv_messenger.targets import Target
from prefill_node.engine_port import ChunkAnnouncer, PrefillEngine
from prefill_node.server import DecodePeers
from protocol import PROTOCOL_VERSION
from protocol.channel import TICK_S as CONTROL_TICK_S
from protocol.gates import Gates
from protocol.messages import (
    Abort,
    DecodeRequest,
    Failure,
    FailureCode,
    Message,
    NodeStatus,
    PrefillTimes,
    RequestEnded,
    Role,
)
from protocol.router_link import RouterLink
from protocol.ticket import TransferKey
from tests.simulation.books import LAYOUT, ComputingEngine, DecodingEngine, Pages, tag_of
from tests.simulation.channel import Channel, SimulatedControl
from tests.simulation.errors import Violation
from tests.simulation.network import Flight, ScheduledEngine, ScheduledNetwork
from tests.simulation.schedule import Process, Schedule, Thread
from tests.simulation.script import LAYERS, PAGE, Script

ROUTER = "tcp://router"
STEP_S = 0.001
BUSY_AGAIN_S = 0.0002
MAX_QUEUE = 16
STOP_S = 5.0


@dataclass(frozen=True)
class Surroundings:
    """What every node lives in."""

    script: Script
    schedule: Schedule
    network: ScheduledNetwork
    channel: Channel


class SimulatedGates(Gates):
    """Held and released by the world."""

    def __init__(self) -> None:
        super().__init__()
        self.shut: set[str] = set()

    def held(self, name: str) -> bool:
        return name in self.shut

    def release_all(self) -> None:
        self.shut.clear()
        for listener in self._listeners:
            listener()


class SimulatedPump:
    """Turns as the pump's thread takes them: the inbox, then the fabric's progress, then its events."""

    def __init__(self, around: Surroundings, process: Process) -> None:
        self._schedule = around.schedule
        self._process = process
        self._lag = around.script.manners.thread_lag
        self._inbox: deque[Callable[[], None]] = deque()
        self._due = False
        self._fabric: ScheduledEngine | None = None
        self._owner: PumpOwner | None = None

    def drive(self, fabric: ScheduledEngine, owner: PumpOwner) -> None:
        self._fabric, self._owner = fabric, owner
        self._schedule.after(self._schedule.within(TICK_S), self._tick, self._process)

    def submit(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self.wake()

    def call(self, action: Callable[[], None]) -> None:
        """The caller waits: so this turn is now."""
        self._inbox.append(action)
        self._turn()

    def wake(self) -> None:
        if not self._due:
            self._due = True
            self._schedule.after(self._schedule.within(self._lag), self._turn, self._process)

    def _turn(self) -> None:
        assert self._fabric is not None and self._owner is not None
        for _ in range(len(self._inbox)):
            self._inbox.popleft()()
        self._due = False
        events = self._fabric.progress(0)
        if events:
            self._owner.on_events(events)
        if self._fabric.stuck and not self._due:
            self._due = True
            self._schedule.after(BUSY_AGAIN_S, self._turn, self._process)

    def _tick(self) -> None:
        assert self._fabric is not None and self._owner is not None
        self._owner.on_tick(self._schedule.now)
        if self._fabric.has_news:
            self.wake()
        self._schedule.after(TICK_S, self._tick, self._process)


class Node:
    """What both kinds have: a process, a fabric with one pool registered, a pump, a control thread, a router link."""

    role: Role

    def __init__(self, around: Surroundings, name: str, incarnation: int, blocks: int, shared: bool) -> None:
        self.around = around
        self.name = name
        self.instance = f"{name}.{incarnation}"
        self.process = Process(self.instance)
        self.address = f"tcp://{name}" if self.role is Role.PREFILL else ""
        self.pages = Pages(blocks, shared)
        self.pump = SimulatedPump(around, self.process)
        self.fabric = ScheduledEngine(around.network, self.process, self.pump.wake, self._rails)
        self.region: MemoryRegion = self.fabric.register(self.pages.address, self.pages.pool.bytes)
        self.gates = SimulatedGates()
        lag = around.script.manners.thread_lag
        self.control = SimulatedControl(around.channel, self.process, self.instance, lag)
        self.router = RouterLink(self.control, self.status, self._on_router_message, self._on_router_lost)
        self.gates.on_release(self._on_gate_released)

    def start(self) -> None:
        self.router.dial(ROUTER)
        self.around.schedule.after(CONTROL_TICK_S, self._control_tick, self.process)

    @property
    def _rails(self) -> int:
        prefill, decode = self.around.script.rails
        return prefill if self.role is Role.PREFILL else decode

    @property
    def draining(self) -> bool:
        raise NotImplementedError

    def status(self) -> NodeStatus:
        return NodeStatus(
            protocol_version=PROTOCOL_VERSION,
            role=self.role,
            instance=self.instance,
            name=self.name,
            control_address=self.address,
            status_address=f"http://{self.name}",
            compatibility="digest",
            tokenizer="tokenizer",
            model="model",
            provider="simulated",
            ready=True,
            draining=self.draining,
            local_prefill=False,
            page_size=PAGE,
            pages_total=self.pages.cache.total,
            pages_free=self.pages.cache.free,
            pages_quarantined=self.pages.cache.quarantined,
            running=0,
            waiting=0,
            max_context=1 << 16,
        )

    def _control_tick(self) -> None:
        self.router.on_tick()
        self._on_tick()
        self.around.schedule.after(CONTROL_TICK_S, self._control_tick, self.process)

    def _on_tick(self) -> None: ...

    def _on_router_message(self, message: DecodeRequest | Abort) -> None: ...

    def _on_router_lost(self) -> None: ...

    def _on_gate_released(self) -> None: ...

    def drain(self) -> None:
        """Take nothing new."""
        raise NotImplementedError

    def stop(self) -> None:
        """After draining: end what still runs. The process ends when `idle` says so, or after STOP_S."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        raise NotImplementedError


class _Thread:
    """A prefill engine's thread: calls between forwards, and forwards layer by layer."""

    def __init__(self, around: Surroundings, process: Process, engine: ComputingEngine, word: ProgressWord) -> None:
        self._schedule = around.schedule
        self._layer_time = around.script.manners.layer_time
        self._process = process
        self._engine = engine
        self._word = word
        self._inbox: deque[Callable[[Engine], object]] = deque()
        self._forward: list[tuple[Request, int, int]] = []
        self._due = False
        self.announcer: ChunkAnnouncer | None = None
        self.on_word: Callable[[], None] = lambda: None
        self.fail_next = False

    def post(self, call: Callable[[Engine], object]) -> None:
        self._inbox.append(call)
        if not self._forward:
            self._turn_soon()

    def _turn_soon(self) -> None:
        if not self._due:
            self._due = True
            self._schedule.after(self._schedule.within(STEP_S), self._turn, self._process)

    def _turn(self) -> None:
        self._due = False
        while self._inbox:
            self._inbox.popleft()(cast(Engine, self._engine))
        self._forward = self._engine.schedule()
        if self._forward:
            assert self.announcer is not None
            self.announcer.before_forward(self._chunks())
            self._layer_soon(0)

    def _chunks(self) -> list[PrefillChunk]:
        tables = [(tuple(self._engine.pages.table(request.owner)),) for request, _, _ in self._forward]
        first = self._word.value + 1
        return [
            PrefillChunk(request_id=request.id, start=start, end=end, tables=table, first_threshold=first)
            for (request, start, end), table in zip(self._forward, tables, strict=True)
        ]

    def _layer_soon(self, layer: int) -> None:
        self._schedule.after(self._schedule.within(self._layer_time), lambda: self._layer(layer), self._process)

    def _layer(self, layer: int) -> None:
        assert self.announcer is not None
        if self.fail_next:
            self.fail_next = False
            failed, self._forward = self._chunks(), self._forward
            self.announcer.forward_failed(failed, "the device fell over")
            for request, _, _ in self._forward:
                self._engine.give_up(request)
            self._ended()
            return
        for request, start, end in self._forward:
            self._engine.compute(request, start, end, layer)
        self._word.advance()
        self.on_word()
        if layer + 1 < LAYERS:
            self._layer_soon(layer + 1)
        else:
            self.announcer.forward_ended(self._chunks(), 1, 2)
            for request, _, end in self._forward:
                self._engine.computed(request, end)
            self._ended()

    def _ended(self) -> None:
        self._forward = []
        self._turn_soon()


class SimulatedPrefillNode(Node):
    role = Role.PREFILL

    def __init__(self, around: Surroundings, name: str, incarnation: int, max_tokens: int) -> None:
        super().__init__(around, name, incarnation, around.script.prefill_blocks, around.script.shared[0])
        word = ProgressWord()
        self.engine = ComputingEngine(self.pages, around.script.chunk_tokens, max_tokens)
        self.thread = _Thread(around, self.process, self.engine, word)
        self.thread.on_word = self.pump.wake
        self.prefills = PrefillEngine(cast(EngineLoop, self.thread), MAX_QUEUE)
        self.prefills.refuse_through(cast(Pump, self.pump))
        self.peers = DecodePeers(self.control)
        self.sender = Sender(
            instance=self.instance,
            compatibility="digest",
            layout=LAYOUT,
            fabric=self.fabric,
            sources=[Source(self.prefills, word.address, [self.region])],
            send=self.peers.send,
            gates=self.gates,
            debug=around.script.debug,
            clock=around.schedule.clock,
        )
        self.thread.announcer = ChunkAnnouncer(cast(Pump, self.pump), self.sender, Gates())
        self.peers.deliver_to(cast(Pump, self.pump), self.sender)
        self.fabric.transfer_of = lambda handle: engine_id(self.sender._sent._batches[handle].key)

    def start(self) -> None:
        self.pump.drive(self.fabric, self.sender)
        self.peers.bind(self.address)
        super().start()

    @property
    def draining(self) -> bool:
        return self.prefills.draining

    def drain(self) -> None:
        self.prefills.draining = True
        self.control.post(self.router.announce)

    def stop(self) -> None:
        going = Failure(FailureCode.DRAINING, "the prefill node is stopping")
        self.pump.submit(lambda: self.sender.stop_all(going))

    @property
    def idle(self) -> bool:
        return self.sender.transfers == 0

    def _on_gate_released(self) -> None:
        self.pump.submit(self.sender.on_gate_released)


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
        self.engine = DecodingEngine(self.pages, script.decode_blocks * PAGE)
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
            me=Introduction(self.instance, name, "digest", LAYOUT),
            fabric=self.fabric,
            targets=[Target(self.seat, [self.region])],
            send=self.links.send,
            hang_up=self.links.hang_up,
            debug=script.debug,
            clock=clock,
        )
        self.links.deliver_to(cast(Pump, self.pump), self.receiver)
        self.fabric.on_landing = self._check_landing
        self.pages.on_free = self._check_freed

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
        block, layer = self.pages.place(flight.target)
        where = f"{flight.transfer} brings {tag} to block {block}, layer {layer} of {self.instance}"
        owner = self._owner_of(flight.transfer)
        if tag is None or tag.layer != layer:
            raise Violation(f"{where}: not what belongs there")
        if owner is None or self.engine.place_of(owner, tag.page) != block:
            raise Violation(f"{where}, which is not its own, or not any more")

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
