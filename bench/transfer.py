"""`python -m bench transfer`: paged writes between two processes, beside this machine's limits and other libraries.

Every way moves the same bytes in pages of the same size, out of and into memory of the same size, with as many pages
outstanding: our fabric over each of its providers and over the same-host path, one TCP stream in C, one thread that
copies, and, with --peers, NIXL and Mooncake. Ours is timed by the receiver, until it has counted the last immediate.
In every repeat each way has its turn at each page size, in an order that rotates: read ratios, machines drift.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from bench.peers.environments import MOONCAKE, NIXL, PeerMissing
from bench.peers.orders import ChildFailed
from bench.transfer_paths import CopyWay, FabricWay, PeerSetting, StreamWay, Way, open_peer
from fabric.libfabric import providers, version
from fabric.same_host import SAME_HOST

PAGES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
IN_FLIGHT = 64
OURS, BESIDE = "kvferry", "kvferry_same_host"


@dataclass(frozen=True, slots=True)
class Implementation:
    """`provider`: what carries its bytes. `outstanding`: pages at once; 0: that is no notion of it."""

    name: str
    provider: str
    open: Callable[[], Way]
    outstanding: int


@dataclass(frozen=True, slots=True)
class Row:
    """In 10^9 bytes a second, one for each repeat."""

    implementation: str
    provider: str
    page_bytes: int
    in_flight: int
    gb_per_s: list[float]

    @property
    def figures(self) -> dict[str, object]:
        spread = {"low": min(self.gb_per_s), "high": max(self.gb_per_s)}
        return {**asdict(self), "median": median(self.gb_per_s), **spread}


@dataclass
class Comparison:
    """`cell_bytes`: of one way, page size and repeat. `missing`: why an implementation has no figures, or no more."""

    cell_bytes: int
    repeats: int
    pages: Sequence[int] = PAGES
    missing: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def run(self, implementations: Sequence[Implementation]) -> None:
        """Opens them one after the other, and closes them all."""
        ways: dict[Implementation, Way] = {}
        try:
            for one in implementations:
                try:
                    ways[one] = one.open()
                except (PeerMissing, ChildFailed) as error:
                    self.missing[one.name] = str(error)
            self._measure(ways)
        finally:
            for way in ways.values():
                way.close()

    def _measure(self, ways: Mapping[Implementation, Way]) -> None:
        cells = {
            (one, page): Row(one.name, one.provider, page, one.outstanding, []) for one in ways for page in self.pages
        }
        for repeat in range(-1, self.repeats):  # the first connects, and touches what the others use
            for page in self.pages:
                for one in _rotated(list(ways), repeat):
                    if one.name not in self.missing:
                        self._turn(one, ways[one], cells[one, page], warm=repeat < 0)
        self.rows = [row for row in cells.values() if len(row.gb_per_s) == self.repeats]

    def _turn(self, one: Implementation, way: Way, row: Row, warm: bool) -> None:
        moved = min(self.cell_bytes, 64 << 20) if warm else self.cell_bytes
        try:
            seconds = way.move(row.page_bytes, moved // row.page_bytes)
        except ChildFailed as error:
            self.missing[one.name] = str(error)
            return
        if not warm:
            row.gb_per_s.append(round(moved / seconds / 1e9, 4))


def _rotated(implementations: Sequence[Implementation], by: int) -> list[Implementation]:
    at = by % len(implementations)
    return [*implementations[at:], *implementations[:at]]


def ours(in_flight: int, only: str | None) -> list[Implementation]:
    """`only`: of the providers."""
    names = [only] if only else [*providers(), SAME_HOST]
    return [_ours(name, in_flight) for name in names]


def _ours(provider: str, in_flight: int) -> Implementation:
    name = BESIDE if provider == SAME_HOST else OURS
    return Implementation(name, provider, lambda: FabricWay(provider, in_flight), in_flight)


LIMITS = [Implementation("raw_tcp", "tcp", StreamWay, 0), Implementation("memcpy", "memory", CopyWay, 0)]


def peers(in_flight: int) -> list[Implementation]:
    return [
        _peer("nixl_tcp", "UCX tcp", PeerSetting("bench.peers.nixl_transfer", NIXL, {"UCX_TLS": "tcp"}), in_flight),
        _peer("nixl_default", "UCX default", PeerSetting("bench.peers.nixl_transfer", NIXL, {}), in_flight),
        _peer(
            "mooncake_tcp",
            "tcp",
            PeerSetting("bench.peers.mooncake_transfer", MOONCAKE, {"GLOG_minloglevel": "1"}),
            in_flight,
        ),
    ]


def _peer(name: str, provider: str, setting: PeerSetting, in_flight: int) -> Implementation:
    return Implementation(name, provider, lambda: open_peer(name, setting, in_flight), in_flight)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench transfer", description=__doc__)
    parser.add_argument("--provider", help="of libfabric, or same-host (default: each that there is)")
    parser.add_argument("--peers", action="store_true", help="beside NIXL and Mooncake (bench.peers.environments)")
    parser.add_argument("--mib", type=int, default=2048, help="MiB per cell and repeat (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="per cell (default: %(default)s)")
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT, help="pages at once (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="no table")
    arguments = parser.parse_args(argv)
    beside = peers(arguments.in_flight) if arguments.peers else []
    comparison = Comparison(arguments.mib << 20, arguments.repeats)
    comparison.run([*ours(arguments.in_flight, arguments.provider), *LIMITS, *beside])
    report = {
        "libfabric": version(),
        "cell_bytes": comparison.cell_bytes,
        "rows": [row.figures for row in comparison.rows],
        "missing": comparison.missing,
    }
    sys.stdout.write(json.dumps(report) + "\n" + ("" if arguments.json else "\n" + table(comparison)))
    return 0


def table(comparison: Comparison) -> str:
    """GB/s: the median, and the least and greatest."""
    sizes = "".join(f"{page >> 10:>14} KiB   " for page in comparison.pages)
    lines = [f"{'GB/s':<18}{'provider':<14}" + sizes]
    by_way: dict[tuple[str, str], list[Row]] = {}
    for row in comparison.rows:
        by_way.setdefault((row.implementation, row.provider), []).append(row)
    for (name, provider), rows in by_way.items():
        lines.append(f"{name:<18}{provider:<14}" + "".join(f"{_cell(row):>18}   " for row in rows))
    lines += [f"missing: {name}: {reason}" for name, reason in comparison.missing.items()]
    return "\n".join(lines) + "\n"


def _cell(row: Row) -> str:
    return f"{median(row.gb_per_s):.2f} ({min(row.gb_per_s):.2f}-{max(row.gb_per_s):.2f})"
