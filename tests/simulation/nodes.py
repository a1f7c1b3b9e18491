"""What both kinds of nodes have, put together as `prefill_node.node` and `decode_node.node` do it, but for threads and
sockets: everything that decides anything is what real nodes run."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from fabric.api import MemoryRegion
from kv_messenger.pump import TICK_S, PumpOwner
from protocol import PROTOCOL_VERSION
from protocol.channel import TICK_S as CONTROL_TICK_S
from protocol.context import NO_CONTEXT
from protocol.gates import Gates
from protocol.messages import (
    Abort,
    DecodeRequest,
    NodeStatus,
    Role,
)
from protocol.router_link import RouterLink
from tests.simulation.books import LAYOUT, Pages
from tests.simulation.channel import Channel, SimulatedControl
from tests.simulation.contexts import CONTEXT, Contexts
from tests.simulation.fabric import ScheduledEngine
from tests.simulation.network import ScheduledNetwork
from tests.simulation.schedule import Process, Schedule
from tests.simulation.script import PAGE, Script

ROUTER = "tcp://router"
STEP_S = 0.001
"""Until an engine's thread goes on, at most."""
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


class Node(ABC):
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
        wanted = around.script.contexts[self.role is Role.DECODE]
        self.layout = msgspec.structs.replace(LAYOUT, context=CONTEXT) if wanted else LAYOUT
        self.contexts = Contexts(around.script.context_slots if wanted else 0)
        self.context_region = self._register_contexts() if wanted else None
        self.gates = SimulatedGates()
        lag = around.script.manners.thread_lag
        self.control = SimulatedControl(around.channel, self.process, self.instance, lag)
        self.router = RouterLink(self.control, self.status, self._on_router_message, self._on_router_lost)
        self.gates.on_release(self._on_gate_released)

    def start(self) -> None:
        self.router.dial(ROUTER)
        self.around.schedule.after(CONTROL_TICK_S, self._control_tick, self.process)

    def _register_contexts(self) -> MemoryRegion:
        return self.fabric.register(self.contexts.address, self.contexts.bytes)

    @property
    def _rails(self) -> int:
        prefill, decode = self.around.script.rails
        return prefill if self.role is Role.PREFILL else decode

    @property
    @abstractmethod
    def draining(self) -> bool: ...

    def status(self) -> NodeStatus:
        return NodeStatus(
            protocol_version=PROTOCOL_VERSION,
            role=self.role,
            instance=self.instance,
            name=self.name,
            control_address=self.address,
            status_address=f"http://{self.name}",
            compatibility="digest",
            dtype="float32",
            context=NO_CONTEXT,
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

    @abstractmethod
    def _on_tick(self) -> None: ...

    @abstractmethod
    def _on_router_message(self, message: DecodeRequest | Abort) -> None: ...

    @abstractmethod
    def _on_router_lost(self) -> None: ...

    @abstractmethod
    def _on_gate_released(self) -> None: ...

    @abstractmethod
    def drain(self) -> None:
        """Take nothing new."""

    @abstractmethod
    def stop(self) -> None:
        """After draining: end what still runs. The process ends when `idle` says so, or after STOP_S."""

    @property
    @abstractmethod
    def idle(self) -> bool: ...
