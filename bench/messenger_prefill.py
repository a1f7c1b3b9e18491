"""The prefill side of `python -m bench messenger`: the real sender, pump, fabric and control sockets.

Only the engine is played: it raises a real progress word from C, layer by layer, without the GIL.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.messenger_ends import INSTANCE, Means, SendingEnd
from bench.messenger_shape import LAYERS, LAYOUT, PEER_NAME, Burner, common_order, cpu_share, pool, tables
from bench.native import advance
from bench.peers.orders import obey_orders
from fabric.api import Event, MemoryRegion, PageWrites, TransferEngine, WritesEnded
from fabric.libfabric import open_engine
from kv_messenger.pump import Pump
from kv_messenger.sender import Sender
from kv_messenger.sender_transfer import Chunk
from protocol.curve import ClusterKey, read_cluster_key
from protocol.messages import Failure

WAIT_S = 60.0
IMMEDIATE = 1 << 20


class PlayedEngine:
    """EnginePort. Requests wait until there are as many as a forward shall have."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._submitted: list[str] = []

    def submit(self, request_id: str, tokens: Sequence[int], refused: Callable[[Failure], None]) -> None:
        with self._change:
            self._submitted.append(request_id)
            self._change.notify_all()

    def abort(self, request_id: str) -> None: ...

    def release(self, request_id: str) -> None: ...

    def take(self, count: int) -> list[str]:
        with self._change:
            assert self._change.wait_for(lambda: len(self._submitted) >= count, WAIT_S), "requests do not come"
            taken, self._submitted = self._submitted[:count], self._submitted[count:]
        return taken


class Watch:
    """PumpOwner: the sender, with the end of each batch taken down."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.ended: list[WritesEnded] = []

    def on_events(self, events: Sequence[Event]) -> None:
        self.ended += [event for event in events if isinstance(event, WritesEnded)]
        self._sender.on_events(events)

    def on_tick(self, now: float) -> None:
        self._sender.on_tick(now)


class Nobody:
    """PumpOwner of writes whose end nobody waits for."""

    def on_events(self, events: Sequence[Event]) -> None: ...

    def on_tick(self, now: float) -> None: ...


class Prefill:
    """`requests`, `pages`: at most, of one order."""

    def __init__(self, provider: str, requests: int, pages: int, key: ClusterKey) -> None:
        self._pool = pool(requests, pages)
        self._engine = PlayedEngine()
        self._burner = Burner()
        self._end = SendingEnd(Means(provider, LAYOUT, self._register, key), self._engine, self._watched)
        self._fabric, self._word, self._sender = self._end.fabric, self._end.word, self._end.sender
        self._pump = self._end.pump

    def _register(self, fabric: TransferEngine) -> MemoryRegion:
        return fabric.register(self._pool.ctypes.data, self._pool.nbytes)

    def _watched(self, sender: Sender) -> Watch:
        self._watch = Watch(sender)
        return self._watch

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "introduce":
            return {
                "instance": INSTANCE,
                "name": PEER_NAME,
                "address": self._end.address,
                "provider": self._fabric.provider,
            }
        if order["do"] == "compute":
            return self._compute(order["requests"], order["pages"], order["chunks"], order["layer_us"])
        if order["do"] == "write to one that never answers":
            return {"cpu_share": self._blocked(bytes.fromhex(order["landing"]), order["seconds"])}
        return common_order(order, self._burner)

    def _compute(self, requests: int, pages: int, chunks: int, layer_us: int) -> dict[str, Any]:
        """All prompts together, in each forward a chunk of each; `moves`: for each layer of each forward when the word
        moved, the first and the last write of that layer was handed over, and how many they are."""
        names = self._engine.take(requests)
        self._watch.ended.clear()
        step, moved = pages // chunks * LAYOUT.page_size, list[int]()
        for start in range(0, pages * LAYOUT.page_size, step):
            moved += self._forward(names, pages, start, start + step, layer_us)
        assert self._sender.wait_idle(WAIT_S), "the transfers do not end"
        ended = sorted(self._watch.ended, key=lambda event: event.handle)
        assert len(ended) == len(names) * len(moved), "a batch for each layer of each chunk of each request"
        # Handles rise as they are armed: forward by forward, request by request, layer by layer.
        by_move = [[ended[self._index(move, r, requests)] for r in range(requests)] for move in range(len(moved))]
        return {"moves": [_move(ns, batches) for ns, batches in zip(moved, by_move, strict=True)]}

    @staticmethod
    def _index(move: int, request: int, requests: int) -> int:
        forward, layer = divmod(move, LAYERS)
        return (forward * requests + request) * LAYERS + layer

    def _forward(self, names: list[str], pages: int, start: int, end: int, layer_us: int) -> list[int]:
        first = self._word.value + 1
        announced = [(name, Chunk(start, end, tables(i, pages), first)) for i, name in enumerate(names)]
        self._pump.call(lambda: self._sender.on_chunks(announced))
        started = time.monotonic_ns()
        moved = advance(self._word.address, LAYERS, layer_us * 1000)
        ended = time.monotonic_ns()
        self._pump.submit(lambda: self._sender.on_forward_ended(names, started, ended))
        return moved

    def _blocked(self, landing: bytes, seconds: float) -> float:
        """The share of a core that it costs a second messenger to be told EAGAIN all the time."""
        fabric = open_engine(self._fabric.provider)
        region = self._register(fabric)
        batch = PageWrites(region, [0], 1, 0, region.remote, [0], 1, 0, 4096, IMMEDIATE)
        pump = Pump(fabric, Nobody())
        pump.start()

        def write() -> None:
            fabric.write(fabric.connect("nobody", landing), batch)

        pump.submit(write)
        share = cpu_share(seconds)
        retries: list[int] = []
        pump.call(lambda: retries.append(fabric.counters().post_retries))
        pump.close()
        assert retries[0] > seconds, "it was not blocked"
        return share

    def close(self) -> None:
        self._burner.switch(False)
        self._end.close()


def _move(moved_ns: int, batches: Sequence[WritesEnded]) -> list[int]:
    first = min(batch.first_posted_ns for batch in batches)
    return [moved_ns, first, max(batch.last_posted_ns for batch in batches), sum(batch.posted for batch in batches)]


def main() -> None:
    provider, requests, pages, key = sys.argv[1:]
    obey_orders(lambda: Prefill(provider, int(requests), int(pages), read_cluster_key(Path(key))))


if __name__ == "__main__":
    main()
