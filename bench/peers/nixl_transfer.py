"""NIXL over UCX, as `python -m bench transfer` drives it: prepared descriptor lists, several transfers in flight.

Both ends keep NIXL's progress thread, as its own examples do: over TCP the target takes part in every write.
"""

import base64
import os
import sys
import time
from collections import deque
from typing import Any

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

from bench.peers.orders import obey_orders

TRANSFERS = 4
"""Outstanding at once, each with its share of the pages: one is posted anew while the others move."""


class Agent:
    """Either end. Every page size has transfers of its own, made with its first order and posted again and again."""

    def __init__(self, role: str, pool_bytes: int, in_flight: int) -> None:
        self._agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
        self._pool = np.ones(pool_bytes, np.uint8)
        self._in_flight = in_flight
        self._agent.register_memory([(self._pool.ctypes.data, pool_bytes, 0, "")], mem_type="DRAM")
        self._remote, self._base = "", 0
        self._made: dict[int, list[Any]] = {}

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "introduce":
            metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
            return {"metadata": metadata, "base": self._pool.ctypes.data}
        if order["do"] == "connect":
            remote = self._agent.add_remote_agent(base64.b64decode(order["metadata"]))
            self._remote, self._base = remote.decode() if isinstance(remote, bytes) else remote, order["base"]
            return {}
        return {"seconds": self._write(order["page"], order["writes"])}

    def close(self) -> None: ...

    def _write(self, page: int, writes: int) -> float:
        if page not in self._made:
            self._made[page] = self._make(page)
        share = max(1, self._in_flight // TRANSFERS)
        left, running = max(1, writes // share), deque[Any]()
        began = time.monotonic()
        free = deque(self._made[page])
        while left or running:
            while left and len(running) < TRANSFERS:
                handle = free.popleft()
                assert self._agent.transfer(handle) != "ERR", "the post failed"
                running.append(handle)
                left -= 1
            before = len(running)
            for _ in range(before):
                handle = running.popleft()
                state = self._agent.check_xfer_state(handle)
                assert state != "ERR", "a transfer failed"
                (free if state == "DONE" else running).append(handle)
            if len(running) == before:
                os.sched_yield()  # to its own progress thread, where cores are few
        return time.monotonic() - began

    def _make(self, page: int) -> list[Any]:
        """As many as the pool has room for, so that the pages are those of all the others."""
        pages, share = len(self._pool) // page, max(1, self._in_flight // TRANSFERS)
        spans = [(at * page, page, 0) for at in range(pages)]
        ours = [(self._pool.ctypes.data + at, size, device) for at, size, device in spans]
        theirs = [(self._base + at, size, device) for at, size, device in spans]
        local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, mem_type="DRAM")
        remote = self._agent.prep_xfer_dlist(self._remote, theirs, mem_type="DRAM")
        cuts = [list(range(at, min(at + share, pages))) for at in range(0, pages, share)]
        return [self._agent.make_prepped_xfer("WRITE", local, cut, remote, cut, skip_desc_merge=True) for cut in cuts]


def main() -> None:
    role, pool_bytes, in_flight = sys.argv[1:]
    obey_orders(lambda: Agent(role, int(pool_bytes), int(in_flight)))


if __name__ == "__main__":
    main()
