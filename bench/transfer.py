"""`python -m bench transfer`: paged writes between two processes, beside a plain TCP stream of the same bytes.

The clock runs on the receiving side, from the order to send until every write was counted (or every byte received).
Both ways alternate within one run, because machines differ and drift: read the ratio, not the figure.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np

from fabric.api import Arrived, Landing, MemoryRegion
from fabric.immediates import ImmediateSlots
from fabric.libfabric import LibfabricEngine, open_engine, version

POOL_BYTES = 64 << 20
PAGES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds, in 10^9 bytes a second. `ratio`: fabric to socket."""

    page: int
    writes: int
    fabric_gb_s: float
    socket_gb_s: float
    ratio: float


class Sender:
    """The other process."""

    def __init__(self, provider: str, landing: Landing, region: MemoryRegion) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.transfer_sender"], stdin=subprocess.PIPE, text=True
        )
        remote = region.remote
        self.tell(
            provider=provider, landing=landing.address.hex(), keys=remote.keys, base=remote.base, length=remote.length
        )

    def tell(self, **order: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.communicate(timeout=30)


class Receiver:
    """Counts what the sender writes, and times it."""

    def __init__(self, engine: LibfabricEngine) -> None:
        self._engine = engine
        self._slots = ImmediateSlots()
        self._pool = np.ones(POOL_BYTES, np.uint8)
        self._region = engine.register(self._pool.ctypes.data, POOL_BYTES)
        self._landing = engine.open_landing("sender")
        self._sender = Sender(engine.provider, self._landing, self._region)

    def fabric_round(self, page: int, writes: int) -> float:
        """Seconds."""
        immediate = self._slots.take()
        assert immediate is not None
        expectation = self._engine.expect(self._landing, immediate, writes)
        began = time.monotonic()
        self._sender.tell(way="fabric", page=page, writes=writes, immediate=immediate)
        while not any(isinstance(event, Arrived) for event in self._engine.progress(1.0)):
            assert time.monotonic() - began < 120, "the writes do not arrive"
        seconds = time.monotonic() - began
        self._engine.forget(expectation)
        self._slots.give_back(immediate)
        return seconds

    def socket_round(self, page: int, writes: int) -> float:
        """Seconds."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            began = time.monotonic()
            self._sender.tell(way="socket", page=page, writes=writes, port=server.getsockname()[1])
            connection, _ = server.accept()
            with connection:
                view, left, at = memoryview(self._pool.data), page * writes, 0
                while left:
                    got = connection.recv_into(view[at : at + page])
                    left, at = left - got, (at + got) % (POOL_BYTES - page)
            return time.monotonic() - began

    def close(self) -> None:
        self._sender.close()
        self._engine.close()


def measure(receiver: Receiver, page: int, total: int, rounds: int) -> Row:
    writes = total // page
    receiver.fabric_round(page, writes)  # connects, and touches what the first round would
    fabric, plain = [], []
    for _ in range(rounds):
        fabric.append(total / receiver.fabric_round(page, writes) / 1e9)
        plain.append(total / receiver.socket_round(page, writes) / 1e9)
    return Row(page, writes, median(fabric), median(plain), median(fabric) / median(plain))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench transfer", description=__doc__)
    parser.add_argument("--provider", help="libfabric provider (default: the best there is)")
    parser.add_argument("--mib", type=int, default=256, help="MiB per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per page size (default: %(default)s)")
    arguments = parser.parse_args(argv)
    receiver = Receiver(engine := open_engine(arguments.provider))
    rows = [measure(receiver, page, arguments.mib << 20, arguments.rounds) for page in PAGES]
    receiver.close()
    report = {"provider": engine.provider, "libfabric": version(), "rows": [asdict(row) for row in rows]}
    sys.stdout.write(json.dumps(report) + "\n\n" + table(rows))
    return 0


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'page KiB':>9}  {'fabric GB/s':>11}  {'socket GB/s':>11}  {'ratio':>6}"]
    for row in rows:
        lines.append(f"{row.page >> 10:>9}  {row.fabric_gb_s:>11.2f}  {row.socket_gb_s:>11.2f}  {row.ratio:>6.2f}")
    return "\n".join(lines) + "\n"
