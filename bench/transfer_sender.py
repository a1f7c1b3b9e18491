"""The sending process of the transfer benchmark: told on stdin what to write where, one JSON line a round."""

import json
import socket
import sys
from typing import Any

import numpy as np

from fabric.api import MemoryRegion, PageWrites, RailKey, RemoteRegion, Sending, TransferEngine, WritesEnded
from fabric.libfabric import open_engine

IN_FLIGHT = 4
"""Batches queued at once: the fabric always has the next writes at hand."""
BATCH = 256


def main() -> None:
    order = json.loads(sys.stdin.readline())
    source = np.random.default_rng(0).integers(0, 256, order["length"], np.uint8)
    engine = open_engine(order["provider"])
    sending = engine.connect("receiver", bytes.fromhex(order["landing"]))
    region = engine.register(source.ctypes.data, source.nbytes)
    for line in sys.stdin:
        turn = json.loads(line)
        if turn["way"] == "fabric":
            write_pages(engine, sending, region, order, turn)
        else:
            send_stream(source, turn)
    engine.close()


def write_pages(
    engine: TransferEngine, sending: Sending, region: MemoryRegion, order: dict[str, Any], turn: dict[str, Any]
) -> None:
    """`writes` pages of `page` bytes, over and over the same memory, all with one immediate."""
    target = RemoteRegion(tuple(RailKey(*pair) for pair in order["keys"]), order["base"], order["length"])
    page, pages, left, open_ = turn["page"], order["length"] // turn["page"], turn["writes"], 0
    while left or open_:
        while left and open_ < IN_FLIGHT:
            indices = [(left - i) % pages for i in range(min(BATCH, left))]
            batch = PageWrites(region, indices, page, 0, target, indices, page, 0, page, turn["immediate"])
            engine.write(sending, batch)
            left, open_ = left - len(indices), open_ + 1
        for event in engine.progress(1.0):
            if isinstance(event, WritesEnded):
                assert event.error is None, event.error
                open_ -= 1


def send_stream(source: np.ndarray[Any, np.dtype[np.uint8]], turn: dict[str, Any]) -> None:
    """The same bytes through one plain TCP connection."""
    page, view = turn["page"], memoryview(source.data)
    with socket.create_connection(("127.0.0.1", turn["port"])) as connection:
        for i in range(turn["writes"]):
            start = i * page % (len(view) - page + 1)
            connection.sendall(view[start : start + page])


if __name__ == "__main__":
    main()
