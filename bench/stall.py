"""`python -m bench stall`: one of three decode nodes stands still (SIGSTOP), and what becomes of the transfers to the
other two.

Real are the sender, three receivers, their pumps, the fabric and the control sockets, each side in a process of its
own; the prefill engine computes whatever is asked for at once. Every receiver is written to all the time, either as
fast as it can be, or at half of that: then a process that stands still frees no CPU time that the others were waiting
for. Rates of the living are compared with their own just before; who is stopped rotates.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.peers.orders import Child
from bench.stall_rows import BEFORE, Load, Turn, Window, table
from bench.stall_shape import LAYOUT, TRANSFER_BYTES
from fabric.libfabric import providers
from fabric.same_host import SAME_HOST
from protocol.curve import write_cluster_key

RECEIVERS = 3
IN_FLIGHT = 8
SHARE = 0.5
"""Of the saturated rate, that the paced load asks for."""
LOOK_S = 0.02
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of the windows, in seconds. `settle`: what is not looked at where the load begins."""

    settle: float = 1.0
    window: float = 2.0


class Star:
    """One prefill process and the decode processes around it. `folder`: for their key, and what they say."""

    def __init__(self, provider: str, in_flight: int, folder: Path) -> None:
        write_cluster_key(key := folder / "cluster.key")
        self.prefill = Child("bench.stall_prefill", [provider, str(key)], log=folder / "prefill.log")
        names = [f"decode-{number}" for number in range(RECEIVERS)]
        self.decodes = [
            Child("bench.stall_decode", [name, provider, str(in_flight), str(key)], log=folder / f"{name}.log")
            for name in names
        ]
        self._in_flight = in_flight
        introduced = self.prefill.ask(do="introduce")
        self._peer = [introduced[name] for name in ("instance", "name", "address")]

    def close(self) -> None:
        for child in (*self.decodes, self.prefill):
            child.close()

    @contextmanager
    def loaded(self, per_s: float) -> Iterator[None]:
        """Each receiver asks for so many transfers a second; 0: for as many as it can have."""
        for decode in self.decodes:
            self._begin(decode, per_s)
        yield
        for decode in self.decodes:
            decode.tell(do="end")
        for decode in self.decodes:
            decode.answer()

    def turn(self, victim: int, per_s: float, lengths: Lengths) -> Turn:
        """Under this load. It is stopped with as much on its way as it can have."""
        self._take()
        stopped, windows = self.decodes[victim], {BEFORE: _rest(lengths.window)}
        lost = self._lost
        self._begin(stopped, 0)
        _until(lambda: self.prefill.ask(do="count")["transfers"] >= self._in_flight)
        stopped.pause()
        windows["stopped"] = _until(lambda: self._lost > lost)
        windows["lost"] = _rest(lengths.window)
        stopped.go_on()
        self._begin(stopped, per_s)
        self._wait_back(stopped)
        windows["back"] = _rest(lengths.window)
        taken = self._take()
        return Turn(victim, windows, [of["arrivals"] for of in taken], taken[victim]["failed"])

    def _begin(self, decode: Child, per_s: float) -> None:
        decode.ask(do="begin", peer=self._peer, per_s=per_s)

    @property
    def _lost(self) -> int:
        return int(self.prefill.ask(do="count")["lost"])

    def _wait_back(self, decode: Child) -> None:
        """Until it has a session again, and its transfers arrive."""
        _until(lambda: self.prefill.ask(do="count")["sessions"] == RECEIVERS)
        arrived = decode.ask(do="count")["arrived"]
        _until(lambda: decode.ask(do="count")["arrived"] > arrived)

    def _take(self) -> list[dict[str, Any]]:
        return [decode.ask(do="take") for decode in self.decodes]


def _rest(seconds: float) -> Window:
    began = time.monotonic_ns()
    threading.Event().wait(seconds)
    return Window(began, time.monotonic_ns())


def _until(what: Callable[[], bool]) -> Window:
    began = time.monotonic_ns()
    while not what():
        assert time.monotonic_ns() - began < PATIENCE_S * 1e9, "it does not happen"
        threading.Event().wait(LOOK_S)
    return Window(began, time.monotonic_ns())


@contextmanager
def star(provider: str, in_flight: int) -> Iterator[Star]:
    with tempfile.TemporaryDirectory() as folder, closing(Star(provider, in_flight, Path(folder))) as processes:
        yield processes


def measure(provider: str, in_flight: int, repeats: int, lengths: Lengths) -> list[Load]:
    """Saturated, then paced."""
    with star(provider, in_flight) as processes:
        saturated = _run(processes, Load(provider, "saturated", 0), repeats, lengths)
        each = [turn.rate(BEFORE, receiver) for turn in saturated.turns for receiver in range(RECEIVERS)]
        return [saturated, _run(processes, Load(provider, "paced", SHARE * median(each)), repeats, lengths)]


def _run(processes: Star, load: Load, repeats: int, lengths: Lengths) -> Load:
    with processes.loaded(load.per_s):
        _rest(lengths.settle)
        load.turns += [processes.turn(repeat % RECEIVERS, load.per_s, lengths) for repeat in range(repeats)]
    return load


def report(loads: Sequence[Load], in_flight: int) -> dict[str, Any]:
    return {
        "receivers": RECEIVERS,
        "in_flight": in_flight,
        "page_bytes": LAYOUT.page_bytes,
        "transfer_bytes": TRANSFER_BYTES,
        "rows": [row.figures for load in loads for row in load.rows()],
        "victims": [{"provider": load.provider, "load": load.name, **load.victims} for load in loads],
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench stall", description=__doc__)
    parser.add_argument("--provider", help="of libfabric, or same-host (default: the best there is, and same-host)")
    parser.add_argument("--repeats", type=int, default=3, help="stops under each load (default: %(default)s)")
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT, help="transfers to each (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="no table")
    arguments = parser.parse_args(argv)
    names = [arguments.provider] if arguments.provider else [providers()[0], SAME_HOST]
    loads = [load for name in names for load in measure(name, arguments.in_flight, arguments.repeats, Lengths())]
    told = report(loads, arguments.in_flight)
    sys.stdout.write(json.dumps(told) + "\n" + ("" if arguments.json else "\n" + table(told)))
    return 0
