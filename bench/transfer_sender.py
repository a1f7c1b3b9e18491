"""The sending process of `python -m bench transfer`, for one provider of the fabric, or for a plain TCP stream."""

import socket
import sys
from typing import Any

from bench.native import send
from bench.peers.orders import obey_orders
from bench.shared_pool import SharedPool
from fabric.api import PageWrites, RailKey, RemoteRegion, TransferEngine, WritesEnded
from fabric.libfabric import open_engine
from fabric.limits import Limits

BATCHES = 4
"""Queued at once: the fabric always has the next writes at hand."""


class FabricSender:
    def __init__(self, provider: str, pool_bytes: int, in_flight: int) -> None:
        self._engine: TransferEngine = open_engine(provider, limits=Limits(endpoint_writes=in_flight))
        self._pool = SharedPool(pool_bytes)
        self._region = self._pool.register(self._engine)
        self._pool_bytes = pool_bytes

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "connect":
            self._sending = self._engine.connect("receiver", bytes.fromhex(order["landing"]))
            keys = tuple(RailKey(*pair) for pair in order["keys"])
            self._target = RemoteRegion(keys, order["base"], order["length"])
        else:
            self._write(order["page"], order["writes"], order["immediate"])
        return {}

    def _write(self, page: int, writes: int, immediate: int) -> None:
        """Pages of `page` bytes, over and over the same memory, all with one immediate."""
        pages, at, open_ = self._pool_bytes // page, 0, 0
        while at < writes or open_:
            while at < writes and open_ < BATCHES:
                indices = [i % pages for i in range(at, min(at + pages, writes))]
                batch = PageWrites(self._region, indices, page, 0, self._target, indices, page, 0, page, immediate)
                self._engine.write(self._sending, batch)
                at, open_ = at + len(indices), open_ + 1
            for event in self._engine.progress(1.0):
                if isinstance(event, WritesEnded):
                    assert event.error is None, event.error
                    open_ -= 1

    def close(self) -> None:
        self._engine.close()


class StreamSender:
    def __init__(self, pool_bytes: int) -> None:
        self._pool = SharedPool(pool_bytes)

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "connect":
            self._connection = socket.create_connection(("127.0.0.1", order["port"]))
        else:
            send(self._connection.fileno(), self._pool.data, order["page"], order["writes"])
        return {}

    def close(self) -> None:
        self._connection.close()


def main() -> None:
    provider, pool_bytes, in_flight = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    obey_orders(lambda: FabricSender(provider, pool_bytes, in_flight) if provider else StreamSender(pool_bytes))


if __name__ == "__main__":
    main()
