"""The decode side of `python -m bench messenger`: the real receiver, pump, fabric, control sockets and engine loop."""

import sys
import threading
import time
from pathlib import Path
from typing import Any

from bench.messenger_ends import Means, ReceivingEnd
from bench.messenger_shape import LAYOUT, Burner, common_order, pool, tables
from bench.null_device import build_null
from bench.peers.orders import obey_orders
from engine.config import ContinuousBatchingConfig
from engine.loop import EngineLoop
from fabric.api import MemoryRegion, TransferEngine
from kv_messenger.attempts import Arrival, Fetch
from protocol.curve import ClusterKey, read_cluster_key
from protocol.messages import Failure, PrefillAddress, PrefillTimes
from protocol.ticket import TransferKey

WAIT_S = 60.0
DEADLINE_S = 60.0


class Owner:
    """TargetOwner: carries arrivals to the engine's loop, as a decode node does, and takes down when they got there."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._change = threading.Condition()
        self._seen: list[tuple[int, int]] = []
        self._safe = 0

    def kv_arrived(self, arrival: Arrival) -> None:
        self._loop.post(lambda _: self._schedulable(arrival.arrived_ns))

    def kv_failed(self, key: TransferKey, failure: Failure) -> None:
        raise AssertionError(f"{key}: {failure.message}")

    def pages_safe(self, key: TransferKey) -> None:
        with self._change:
            self._safe += 1
            self._change.notify_all()

    def prefill_timed(self, key: TransferKey, times: PrefillTimes) -> None: ...

    def wait(self, count: int) -> list[tuple[int, int]]:
        """When the last write of each was counted, and when the engine's loop saw it."""
        with self._change:
            there = self._change.wait_for(lambda: self._safe >= count <= len(self._seen), WAIT_S)
            assert there, f"{len(self._seen)} of {count} transfers arrived"
            seen, self._seen, self._safe = self._seen, [], 0
        return seen

    def _schedulable(self, arrived_ns: int) -> None:
        now = time.monotonic_ns()
        with self._change:
            self._seen.append((arrived_ns, now))
            self._change.notify_all()


class Decode:
    """`requests`, `pages`: at most, of one order."""

    def __init__(self, name: str, provider: str, requests: int, pages: int, key: ClusterKey) -> None:
        self._pool = pool(requests, pages)
        self._loop = EngineLoop(build_null(ContinuousBatchingConfig(page_size=16, num_blocks=8)), lambda _: None)
        self._owner = Owner(self._loop)
        self._burner = Burner()
        self._end = ReceivingEnd(name, Means(provider, LAYOUT, self._register, key), self._owner)
        self._fetched = 0
        self._end.start()
        self._loop.start()

    def _register(self, fabric: TransferEngine) -> MemoryRegion:
        return fabric.register(self._pool.ctypes.data, self._pool.nbytes)

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "fetch":
            return {"arrivals": self._fetch(PrefillAddress(*order["peer"]), order["requests"], order["pages"])}
        return common_order(order, self._burner)

    def _fetch(self, peer: PrefillAddress, requests: int, pages: int) -> list[tuple[int, int]]:
        for request in range(requests):
            self._fetched += 1
            fetch = Fetch(
                key=TransferKey(f"request-{self._fetched}", 1, self._end.instance),
                public_id="",
                peer=peer,
                tokens=[0] * pages * LAYOUT.page_size,
                tables=tables(request, pages),
                first_page=0,
                deadline_s=DEADLINE_S,
            )
            self._end.pump.submit(lambda fetch=fetch: self._end.receiver.fetch(fetch))  # type: ignore[misc]
        return self._owner.wait(requests)

    def close(self) -> None:
        self._burner.switch(False)
        self._end.close()
        self._loop.stop()


def main() -> None:
    name, provider, requests, pages, key = sys.argv[1:]
    obey_orders(lambda: Decode(name, provider, int(requests), int(pages), read_cluster_key(Path(key))))


if __name__ == "__main__":
    main()
