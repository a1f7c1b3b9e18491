"""A real sender and a real receiver with every rank's pool, driven by hand on one thread; engines are played."""

import ctypes
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from fabric.api import MemoryRegion, TransferEngine
from kv_messenger.attempts import Arrival, Fetch
from kv_messenger.peers import Introduction
from kv_messenger.receiver import Receiver
from kv_messenger.sender import Sender
from kv_messenger.sender_transfer import Chunk
from kv_messenger.sources import Source
from kv_messenger.targets import Target
from protocol.gates import Gates
from protocol.layout import KVLayout
from protocol.messages import (
    AbortTransfer,
    Failure,
    Hello,
    HelloRefused,
    Ping,
    Pong,
    PrefillAddress,
    PrefillRefused,
    PrefillRequest,
    PrefillTimes,
    RailFenced,
    RailLost,
    Stopped,
    TransferFinished,
    Welcome,
)
from protocol.ticket import TransferKey
from tests.kv_messenger.builders import SLOTS, TARGET_SLOT, ScriptedEngine
from tests.kv_messenger.moving import Side, element, holders

PEER = PrefillAddress("prefill-instance", "prefill-0", "tcp://127.0.0.1:1")
PATIENCE_S = 30.0
SOURCE_SLOT = 1
NAMES = 1 << 18
"""What of an element's value does not name the rank."""


@dataclass
class Owner:
    arrivals: list[Arrival] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    safe: list[TransferKey] = field(default_factory=list)

    def kv_arrived(self, arrival: Arrival) -> None:
        self.arrivals.append(arrival)

    def kv_failed(self, key: TransferKey, failure: Failure) -> None:
        self.failures.append(failure)

    def pages_safe(self, key: TransferKey) -> None:
        self.safe.append(key)

    def prefill_timed(self, key: TransferKey, times: PrefillTimes) -> None: ...


class Contexts:
    """One engine's context slots, `[SLOTS, bytes]`, or none."""

    def __init__(self, fabric: TransferEngine, layout: KVLayout) -> None:
        self.slots = np.zeros((SLOTS, layout.context.slot_bytes), dtype=np.uint8)
        self.region = fabric.register(self.slots.ctypes.data, self.slots.nbytes) if self.slots.size else None


class PlayedEngine(ScriptedEngine):
    """One prefill engine: its pools, its context slots, and a progress word that the test moves."""

    def __init__(self, side: Side, contexts: Contexts) -> None:
        super().__init__()
        self.side = side
        self.contexts = contexts
        self.word = ctypes.c_uint64(0)

    def leave_context(self) -> None:
        """In SOURCE_SLOT: no byte as its neighbour, none 0."""
        slot = self.contexts.slots[SOURCE_SLOT]
        slot[:] = 1 + np.arange(slot.size) % 251


class Pair:
    """`engines`: of each node, every one with room for one prompt of `tokens` tokens. `clock`: of all deadlines,
    which pass by `tick`."""

    def __init__(
        self,
        open_fabric: Callable[[], TransferEngine],
        source: KVLayout,
        target: KVLayout,
        tokens: int,
        engines: tuple[int, int] = (1, 1),
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        rng, groups = random.Random(seed), range(len(source.groups))
        self.tokens, self.layers = tokens, source.layers
        self.whole_pages = source.page_size == target.page_size
        self.fabrics = open_fabric(), open_fabric()
        sides = [Side(source, [source.pages_for(g, tokens) for g in groups], rng) for _ in range(engines[0])]
        self.engines = [PlayedEngine(side, Contexts(self.fabrics[0], source)) for side in sides]
        self.targets = [Side(target, [target.pages_for(g, tokens) for g in groups], rng) for _ in range(engines[1])]
        self.contexts = [Contexts(self.fabrics[1], target) for _ in self.targets]
        self.owner = Owner()
        self._to_sender: deque[msgspec.Struct] = deque()
        self._to_receiver: deque[msgspec.Struct] = deque()
        self.sender = Sender(
            instance=PEER.instance,
            compatibility="digest",
            layout=source,
            fabric=self.fabrics[0],
            sources=[
                Source(e, ctypes.addressof(e.word), tuple(register(self.fabrics[0], e.side)), e.contexts.region)
                for e in self.engines
            ],
            send=lambda _, message: self._to_receiver.append(message),
            gates=Gates(),
            clock=clock,
        )
        self.receiver = Receiver(
            me=Introduction("decode-instance", "decode-0", "digest", target),
            fabric=self.fabrics[1],
            targets=[
                Target(self.owner, register(self.fabrics[1], side), contexts.region)
                for side, contexts in zip(self.targets, self.contexts, strict=True)
            ],
            send=lambda _, message: self._to_sender.append(message),
            hang_up=lambda _: None,
            debug=True,
            clock=clock,
        )

    def fetch(self, name: str = "request", target: int = 0, deadline_s: float = PATIENCE_S) -> None:
        key, tables = TransferKey(name, 1, "decode-instance"), self.targets[target].tables
        slot = TARGET_SLOT if self.contexts[target].region else None
        self.receiver.fetch(Fetch(key, "", PEER, [7] * self.tokens, tables, 0, deadline_s, target, slot))

    def compute(self, engine: PlayedEngine, chunk: int) -> None:
        """All that was submitted to it, one prompt at most."""
        for request_id in engine.submitted:
            for start in range(0, self.tokens, chunk):
                end = min(self.tokens, start + chunk)
                announced = Chunk(start, end, engine.side.tables, engine.word.value + 1, SOURCE_SLOT)
                self.sender.on_chunks([(request_id, announced)])
                engine.side.compute(start, end)
                engine.word.value += self.layers
                if end == self.tokens:
                    engine.leave_context()
                self.sender.on_forward_ended([request_id], 1, 2)
        engine.submitted.clear()

    def run_until(self, what: Callable[[], object], chunk: int = 16, receiving: bool = True) -> None:
        """Not `receiving`: what is posted meanwhile stays on its way."""
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, "nothing happens any more"
            self._deliver()
            for engine in self.engines:
                self.compute(engine, chunk)
            self.sender.on_events(self.fabrics[0].progress(0.001))
            if receiving:
                self.receiver.on_events(self.fabrics[1].progress(0.001))

    def tick(self) -> None:
        """Each side looks at the clock, and hears what the other has to say then."""
        self.receiver.on_tick(self._clock())
        self.sender.on_tick(self._clock())
        self._deliver()

    def close(self) -> None:
        for fabric in self.fabrics:
            fabric.close()

    def _deliver(self) -> None:
        while self._to_sender:
            deliver_to_sender(self.sender, self._to_sender.popleft())
        while self._to_receiver:
            deliver_to_receiver(self.receiver, self._to_receiver.popleft())


def register(fabric: TransferEngine, side: Side) -> list[MemoryRegion]:
    return [fabric.register(pool.ctypes.data, pool.nbytes) for pool in side.pools]


def deliver_to_sender(sender: Sender, message: msgspec.Struct) -> None:
    match message:
        case Hello():
            sender.on_hello(message)
        case Ping():
            sender.on_ping(message)
        case PrefillRequest():
            sender.on_prefill_request(message)
        case AbortTransfer():
            sender.on_abort(message)
        case RailFenced():
            sender.on_rail_fenced(message)


def deliver_to_receiver(receiver: Receiver, message: msgspec.Struct) -> None:
    match message:
        case Welcome():
            receiver.on_welcome(message)
        case Pong():
            receiver.on_seen(message.instance)
        case HelloRefused():
            receiver.on_hello_refused(PEER.instance, message)
        case PrefillRefused():
            receiver.on_refused(message)
        case TransferFinished():
            receiver.on_finished(message)
        case Stopped():
            receiver.on_stopped(message)
        case RailLost():
            receiver.on_rail_lost(message)


def expect_whole(side: Side, tokens: int, slack: bool) -> None:
    """Every element of the prompt's KV on every rank that holds it, and nothing else. `slack`: what lies behind the
    last token in the request's own pages may be anything."""
    of, left = side.layout, side.pools.copy()
    for group, layers in enumerate(of.groups):
        positions = np.arange(max(0, tokens - (layers.window or tokens)), tokens)
        slots = positions if layers.window is None else positions % layers.window
        behind = np.arange(layers.slots(tokens), of.pages_for(group, tokens) * of.page_size)
        for ordinal, layer in enumerate(layers.layers):
            for head in range(of.kv_heads):
                for rank in holders(of.kv_heads, of.tensor_parallel, head):
                    for part in range(of.parts):
                        where = side.at(group, ordinal, rank, head, part, slots)
                        names = element(of, layer, head, part, positions, rank=0)
                        assert np.array_equal(left[rank, where] % NAMES, names), (layer, head, part, rank)
                        left[rank, where] = 0
                        if slack:
                            left[rank, side.at(group, ordinal, rank, head, part, behind)] = 0
    assert not left.any(), "something else was written to"
