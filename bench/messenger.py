"""`python -m bench messenger`: what the KV messenger itself costs, without a model, between two processes.

Real are the sender, the receiver, their pumps, the fabric, the control sockets and the decode engine's loop; the
prefill engine is played by a thread that raises a real progress word in C. Times are CLOCK_MONOTONIC stamps of the
fabric's C core and of that thread. Everything is measured in quiet processes, and with a Python thread that burns the
GIL of the prefill or of the decode process.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.messenger_rows import Load, Row, Sample, row, table
from bench.messenger_shape import LAYOUT
from bench.peers.orders import Child
from protocol.curve import write_cluster_key

BURNERS = ("none", "prefill", "decode")
IN_FLIGHT = 64
LOADS = (
    Load("one transfer", requests=1, pages=16, chunks=2, layer_us=1000, repeats=300),
    Load(f"{IN_FLIGHT} in flight", requests=IN_FLIGHT, pages=2, chunks=2, layer_us=4000, repeats=12),
)
WHOLE = Load("all at once", requests=1, pages=64, chunks=1, layer_us=0, repeats=20)
"""Every layer is there at once: how fast the bytes of one can cross."""
REST_S = 4.0
BLOCKED_S = 2.0


@dataclass(frozen=True, slots=True)
class Shares:
    """Of a core. `idle`: of either process, with a peer that it hears of; `blocked`: of the prefill process whose
    writes are told EAGAIN all the time, by the landing of a stopped process."""

    idle_prefill: float
    idle_decode: float
    blocked: float


class Pair:
    """Both processes. `room`: requests and pages of the largest load."""

    def __init__(self, provider: str, room: tuple[int, int], key: Path) -> None:
        common = [provider, *map(str, room), str(key)]
        self.prefill = Child("bench.messenger_prefill", common)
        self.decode = Child("bench.messenger_decode", ["decode-1", *common])
        introduced = self.prefill.ask(do="introduce")
        self.provider = introduced.pop("provider")
        self._peer = [introduced[name] for name in ("instance", "name", "address")]

    def move(self, load: Load) -> Sample:
        """One repeat of it."""
        self.prefill.tell(
            do="compute", requests=load.requests, pages=load.pages, chunks=load.chunks, layer_us=load.layer_us
        )
        arrivals = self.decode.ask(do="fetch", peer=self._peer, requests=load.requests, pages=load.pages)["arrivals"]
        return Sample(self.prefill.answer()["moves"], arrivals)

    def burn(self, where: str, on: bool) -> None:
        if where != "none":
            (self.prefill if where == "prefill" else self.decode).ask(do="burn", on=on)

    def shares(self, rest_s: float, blocked_s: float) -> Shares:
        """The idle processes are measured together."""
        for child in (self.prefill, self.decode):
            child.tell(do="rest", seconds=rest_s)
        prefill, decode = (child.answer()["cpu_share"] for child in (self.prefill, self.decode))
        landing = Child("bench.messenger_landing", [self.provider])
        address = landing.ask()["address"]
        landing.pause()
        blocked = self.prefill.ask(do="write to one that never answers", landing=address, seconds=blocked_s)
        landing.close()
        return Shares(prefill, decode, blocked["cpu_share"])

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


@contextmanager
def pair(provider: str, loads: Sequence[Load]) -> Iterator[Pair]:
    room = max(load.requests * load.pages for load in loads), 1
    with tempfile.TemporaryDirectory() as folder:
        write_cluster_key(key := Path(folder) / "cluster.key")
        both = Pair(provider, room, key)
        try:
            yield both
        finally:
            both.close()


def measure(both: Pair, load: Load, repeats: int) -> list[Row]:
    """A row for each burner; they take turns, so that what the machine does besides meets all alike."""
    samples: dict[str, list[Sample]] = {burner: [] for burner in BURNERS}
    both.move(load)  # connects, and touches what the first would
    for share in _shares(repeats):
        for burner in BURNERS:
            both.burn(burner, True)
            samples[burner] += [both.move(load) for _ in range(share)]
            both.burn(burner, False)
    return [row(load, burner, of_burner) for burner, of_burner in samples.items()]


def _shares(repeats: int, turns: int = 5) -> list[int]:
    """Of about the same size, none empty."""
    return [n for n in (repeats * (i + 1) // turns - repeats * i // turns for i in range(turns)) if n]


def rate(both: Pair, load: Load, repeats: int) -> float:
    """Bytes a nanosecond, from the first write handed over to the last one counted; the median."""
    took = []
    for _ in range(repeats):
        sample = both.move(load)
        took.append(sample.last_arrival_ns - min(move.first_ns for move in sample.moves))
    return load.bytes / sorted(took)[len(took) // 2]


def run(provider: str, fewer: int) -> dict[str, Any]:
    """`fewer`: by how much less than all repeats, for tests."""
    with pair(provider, [*LOADS, WHOLE]) as both:
        rows = [one for load in LOADS for one in measure(both, load, max(1, load.repeats // fewer))]
        bytes_per_ns = rate(both, WHOLE, max(1, WHOLE.repeats // fewer))
        shares = both.shares(REST_S / fewer, BLOCKED_S / fewer)
        return {
            "provider": both.provider,
            "page_bytes": LAYOUT.page_bytes,
            "gb_per_s": bytes_per_ns,
            "rows": [asdict(one.beside(bytes_per_ns)) for one in rows],
            "cpu_share": asdict(shares),
        }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench messenger", description=__doc__)
    parser.add_argument("--provider", default="", help="libfabric provider (default: the best there is)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the repeats")
    parser.add_argument("--json", action="store_true", help="no table")
    arguments = parser.parse_args(argv)
    report = run(arguments.provider, 10 if arguments.quick else 1)
    sys.stdout.write(json.dumps(report) + "\n" + ("" if arguments.json else "\n" + table(report)))
    return 0
