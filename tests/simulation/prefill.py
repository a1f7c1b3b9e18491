"""A prefill node: the real sender, engine port and control plane around a played engine."""

from collections import deque
from collections.abc import Callable
from typing import cast

from engine.engine import Engine
from engine.loop import EngineLoop
from engine.outputs import PrefillChunk
from engine.progress import ProgressWord
from engine.request import Request
from kv_messenger.pump import Pump
from kv_messenger.sender import Sender
from kv_messenger.sent import engine_id
from kv_messenger.sources import Source
from prefill_node.engine_port import ChunkAnnouncer, PrefillEngine
from prefill_node.server import DecodePeers
from protocol.gates import Gates
from protocol.messages import Abort, DecodeRequest, Failure, FailureCode, Role
from tests.simulation.engines import ComputingEngine
from tests.simulation.nodes import MAX_QUEUE, STEP_S, Node, Surroundings
from tests.simulation.schedule import Process
from tests.simulation.script import LAYERS


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
        slot = self._engine.contexts.slot
        return [
            PrefillChunk(request.id, start, end, table, first, slot(request.owner))
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
            for request, _, end in self._forward:
                self._engine.leave_context(request, end)
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
        self.engine = ComputingEngine(self.pages, self.contexts, around.script.chunk_tokens, max_tokens)
        self.thread = _Thread(around, self.process, self.engine, word)
        self.thread.on_word = self.pump.wake
        self.prefills = PrefillEngine(cast(EngineLoop, self.thread), MAX_QUEUE)
        self.prefills.refuse_through(cast(Pump, self.pump))
        self.peers = DecodePeers(self.control)
        self.sender = Sender(
            instance=self.instance,
            compatibility="digest",
            layout=self.layout,
            fabric=self.fabric,
            sources=[Source(self.prefills, word.address, [self.region], self.context_region)],
            send=self.peers.send,
            gates=self.gates,
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

    def _on_tick(self) -> None:
        """Its engine has a clock of its own."""

    def _on_router_message(self, message: DecodeRequest | Abort) -> None:
        """Routers send requests to decode nodes alone."""

    def _on_router_lost(self) -> None:
        """Its decode nodes are told."""

    def _on_gate_released(self) -> None:
        self.pump.submit(self.sender.on_gate_released)
