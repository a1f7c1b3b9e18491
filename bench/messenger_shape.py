"""What both processes of `python -m bench messenger` agree on, and what each of them has besides its half of the
messenger."""

import os
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.layout import KVLayout, full_layout

LAYERS = 8
LAYOUT: KVLayout = full_layout(layers=LAYERS, kv_heads=2, page_size=16, head_dim=64, dtype="float32")
"""Pages of 16 KiB."""
COMPATIBILITY = "bench"
PEER_NAME = "prefill"


def pool(requests: int, pages: int) -> npt.NDArray[np.uint8]:
    """Room for each page of each request, and touched."""
    return np.ones(requests * pages * LAYOUT.block_bytes(0), np.uint8)


def tables(request: int, pages: int) -> list[list[int]]:
    """The blocks of one request."""
    return [list(range(request * pages, (request + 1) * pages))]


class Burner:
    """A Python thread that never lets go of the GIL by itself."""

    def __init__(self) -> None:
        self._burning = threading.Event()
        self._thread: threading.Thread | None = None

    def switch(self, on: bool) -> None:
        if self._thread is not None:
            self._burning.clear()
            self._thread.join()
            self._thread = None
        if on:
            self._burning.set()
            self._thread = threading.Thread(target=self._burn, name="burner", daemon=True)
            self._thread.start()

    def _burn(self) -> None:
        number = 1
        while self._burning.is_set():
            for _ in range(10_000):
                number = number * 1103515245 % 2147483648 + 12345


def cpu_share(seconds: float) -> float:
    """Of one core, by all threads of this process, over the next `seconds`."""
    began, used = time.monotonic(), time.process_time()
    threading.Event().wait(seconds)
    return (time.process_time() - used) / (time.monotonic() - began)


def common_order(order: dict[str, Any], burner: Burner) -> dict[str, Any]:
    """Those that either process obeys."""
    if order["do"] == "burn":
        burner.switch(order["on"])
        return {}
    assert order["do"] == "rest", order
    return {"cpu_share": cpu_share(order["seconds"]), "pid": os.getpid()}
