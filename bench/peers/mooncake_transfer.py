"""Mooncake's transfer engine over TCP, as `python -m bench transfer` drives it: batches of pages, two in flight."""

import sys
import time
from typing import Any

from mooncake.engine import TransferEngine

from bench.peers.orders import obey_orders

BATCHES = 2
"""Outstanding at once, each with half of the pages."""


class Engine:
    """Either end; its pool is a buffer of Python's, which nothing moves."""

    def __init__(self, pool_bytes: int, in_flight: int) -> None:
        self._engine = TransferEngine()
        assert self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, "it does not start"
        self._base = self._engine.allocate_managed_buffer(pool_bytes)
        self._pool_bytes, self._in_flight = pool_bytes, in_flight
        self._peer, self._target = "", 0

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "introduce":
            return {"peer": f"127.0.0.1:{self._engine.get_rpc_port()}", "target": self._base}
        if order["do"] == "connect":
            self._peer, self._target = order["peer"], order["target"]
            return {}
        return {"seconds": self._write(order["page"], order["writes"])}

    def close(self) -> None: ...

    def _write(self, page: int, writes: int) -> float:
        share, pages = max(1, self._in_flight // BATCHES), self._pool_bytes // page
        running: list[int] = []
        began = time.monotonic()
        for first in range(0, writes, share):
            if len(running) == BATCHES:
                self._wait(running.pop(0))
            offsets = [i % pages * page for i in range(first, min(first + share, writes))]
            sources, targets = [self._base + o for o in offsets], [self._target + o for o in offsets]
            batch = self._engine.batch_transfer_async_write(self._peer, sources, targets, [page] * len(offsets))
            assert batch, "the post failed"
            running.append(batch)
        for batch in running:
            self._wait(batch)
        return time.monotonic() - began

    def _wait(self, batch: int) -> None:
        assert self._engine.get_batch_transfer_status([batch]) == 0, "a transfer failed"


def main() -> None:
    _, pool_bytes, in_flight = sys.argv[1:]
    obey_orders(lambda: Engine(int(pool_bytes), int(in_flight)))


if __name__ == "__main__":
    main()
