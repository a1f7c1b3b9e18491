"""The decode side of `python -m bench messenger`: the real receiver, pump, fabric, control sockets and engine loop."""

import sys
import threading
import time
from pathlib import Path
from typing import Any

from bench.messenger_shape import COMPATIBILITY, LAYOUT, Burner, common_order, pool, tables
from bench.null_device import build_null
from bench.peers.orders import obey_orders
from decode_node.server import PrefillLinks
from engine.config import ContinuousBatchingConfig
from engine.loop import EngineLoop
from fabric.libfabric import open_engine
from kv_messenger.attempts import Arrival, Fetch
from kv_messenger.peers import Introduction
from kv_messenger.pump import Pump
from kv_messenger.receiver import Receiver
from kv_messenger.targets import Target
from protocol.channel import ControlThread
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
        self._instance = f"bench-{name}"
        self._fabric = open_engine(provider or None)
        self._pool = pool(requests, pages)
        region = self._fabric.register(self._pool.ctypes.data, self._pool.nbytes)
        self._loop = EngineLoop(build_null(ContinuousBatchingConfig(page_size=16, num_blocks=8)), lambda _: None)
        self._owner = Owner(self._loop)
        self._burner = Burner()
        self._control = ControlThread(key, self._instance, lambda: None)
        links = PrefillLinks(self._control)
        self._receiver = Receiver(
            me=Introduction(self._instance, name, COMPATIBILITY, LAYOUT),
            fabric=self._fabric,
            targets=[Target(self._owner, [region])],
            send=links.send,
            hang_up=links.hang_up,
        )
        self._pump = Pump(self._fabric, self._receiver)
        links.deliver_to(self._pump, self._receiver)
        self._fetched = 0
        self._loop.start()
        self._pump.start()
        self._control.start()

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "fetch":
            return {"arrivals": self._fetch(PrefillAddress(*order["peer"]), order["requests"], order["pages"])}
        return common_order(order, self._burner)

    def _fetch(self, peer: PrefillAddress, requests: int, pages: int) -> list[tuple[int, int]]:
        for request in range(requests):
            self._fetched += 1
            fetch = Fetch(
                key=TransferKey(f"request-{self._fetched}", 1, self._instance),
                public_id="",
                peer=peer,
                tokens=[0] * pages * LAYOUT.page_size,
                tables=tables(request, pages),
                first_page=0,
                deadline_s=DEADLINE_S,
            )
            self._pump.submit(lambda fetch=fetch: self._receiver.fetch(fetch))  # type: ignore[misc]
        return self._owner.wait(requests)

    def close(self) -> None:
        self._burner.switch(False)
        self._control.close()
        self._pump.close()
        self._loop.stop()


def main() -> None:
    name, provider, requests, pages, key = sys.argv[1:]
    obey_orders(lambda: Decode(name, provider, int(requests), int(pages), read_cluster_key(Path(key))))


if __name__ == "__main__":
    main()
