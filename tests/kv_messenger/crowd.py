"""One real sender and several real receivers, driven by hand on one thread; the engine is played. Every prompt is
alike, and read from the same pages."""

import ctypes
import time
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from fabric.api import TransferEngine
from kv_messenger.attempts import Fetch
from kv_messenger.peers import PEER_TIMEOUT_S, Introduction
from kv_messenger.receiver import Receiver
from kv_messenger.sender import Sender
from kv_messenger.sender_transfer import Chunk
from kv_messenger.sources import Source
from kv_messenger.targets import Target
from protocol.gates import Gates
from protocol.messages import Ping
from protocol.ticket import TransferKey
from tests.fabric.shared_memory import register_shared
from tests.kv_messenger.builders import ScriptedEngine, layout
from tests.kv_messenger.pairing import PEER, Owner, deliver_to_receiver, deliver_to_sender

OF = layout(layers=3, page_size=4)
TOKENS = 7
BLOCKS = 2
"""Of a prompt."""
PATIENCE_S = 30.0


class Wants:
    """A decode side with room for `prompts` of them."""

    def __init__(self, name: str, fabric: TransferEngine, prompts: int, send: Callable[[msgspec.Struct], None]) -> None:
        self.instance = f"{name}-instance"
        self.fabric = fabric
        self.owner = Owner()
        self.inbox: deque[msgspec.Struct] = deque()
        self.stands_still = False
        self.pool, region = register_shared(fabric, prompts * BLOCKS * OF.block_bytes(0))
        self.pool[:] = 0
        self._asked = 0
        self.receiver = Receiver(
            me=Introduction(self.instance, name, "digest", OF),
            fabric=fabric,
            targets=[Target(self.owner, [region])],
            send=lambda _, message: send(message),
            hang_up=lambda _: None,
        )

    def fetch(self, deadline_s: float = PATIENCE_S) -> TransferKey:
        """To the next place."""
        key, at = TransferKey(f"request-{self._asked}", 1, self.instance), self._asked * BLOCKS
        self._asked += 1
        self.receiver.fetch(Fetch(key, "", PEER, [7] * TOKENS, [list(range(at, at + BLOCKS))], 0, deadline_s))
        return key

    def turn(self) -> None:
        while self.inbox and not self.stands_still:
            deliver_to_receiver(self.receiver, self.inbox.popleft())
        if not self.stands_still:
            self.receiver.on_events(self.fabric.progress(0.0002))


class Crowd:
    """`prompts`: to each receiver, at most. `room`: prompts that the prefill engine's pool holds."""

    def __init__(self, open_fabric: Callable[[], TransferEngine], receivers: int, prompts: int, room: int) -> None:
        self.fabric = open_fabric()
        self.now = 0.0
        self.engine = ScriptedEngine()
        self.word = ctypes.c_uint64(0)
        self.pool, region = register_shared(self.fabric, room * BLOCKS * OF.block_bytes(0))
        self.pool[:] = 1 + np.arange(self.pool.size) % 251
        self._to_sender: deque[msgspec.Struct] = deque()
        self.wants = [Wants(f"decode-{n}", open_fabric(), prompts, self._to_sender.append) for n in range(receivers)]
        by_instance = {want.instance: want for want in self.wants}
        self.sender = Sender(
            instance=PEER.instance,
            compatibility="digest",
            layout=OF,
            fabric=self.fabric,
            sources=[Source(self.engine, ctypes.addressof(self.word), [region])],
            send=lambda instance, message: by_instance[instance].inbox.append(message),
            gates=Gates(),
            clock=lambda: self.now,
        )

    def compute(self, request_ids: list[str]) -> None:
        """In one forward."""
        self.announce(request_ids)
        self.word.value += OF.layers
        self.sender.on_forward_ended(request_ids, 1, 2)

    def announce(self, request_ids: list[str]) -> None:
        chunk = Chunk(0, TOKENS, [range(BLOCKS)], self.word.value + 1)
        self.sender.on_chunks([(name, chunk) for name in request_ids])

    def compute_all(self) -> None:
        """What was submitted until now."""
        submitted, self.engine.submitted = self.engine.submitted, []
        self.compute(submitted)

    def give_up(self, silent: Wants) -> None:
        """The prefill side has heard of all others, and of this one for too long nothing."""
        self.now += PEER_TIMEOUT_S + 1
        for want in self.wants:
            if want is not silent:
                self.sender.on_ping(Ping(instance=want.instance))
        self.sender.on_tick(self.now)

    def run_until(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, "nothing happens any more"
            self.turn()

    def turn(self) -> None:
        while self._to_sender:
            deliver_to_sender(self.sender, self._to_sender.popleft())
        self.sender.on_events(self.fabric.progress(0.0002))
        for want in self.wants:
            want.turn()

    def close(self) -> None:
        for fabric in (self.fabric, *(want.fabric for want in self.wants)):
            fabric.close()

    @property
    def at_rest(self) -> bool:
        gauges = [fabric.gauges() for fabric in (self.fabric, *(want.fabric for want in self.wants))]
        held = sum(of.outstanding + of.armed + of.expectations for of in gauges)
        return not (held or self.sender.transfers or any(want.receiver.transfers for want in self.wants))
