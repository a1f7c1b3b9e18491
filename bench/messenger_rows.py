"""Figures of `python -m bench messenger`, from the stamps that one transfer after the other left."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import quantiles
from typing import Any, NamedTuple

from bench.messenger_shape import LAYERS, LAYOUT


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` prompts of `pages` pages, computed together in `chunks` forwards whose layers take `layer_us`."""

    name: str
    requests: int
    pages: int
    chunks: int
    layer_us: int
    repeats: int

    @property
    def layer_bytes(self) -> int:
        """Of one layer of the last chunk, of all requests."""
        return self.requests * self.pages // self.chunks * LAYOUT.page_bytes

    @property
    def bytes(self) -> int:
        return self.requests * self.pages * LAYOUT.block_bytes(0)


class Move(NamedTuple):
    """When the word moved, when the first and the last of that layer's writes was handed to the provider, and how many
    these are."""

    moved_ns: int
    first_ns: int
    last_ns: int
    writes: int


class Sample:
    """One repeat. `arrivals`: of each request, when its last write was counted and when the engine's loop saw it."""

    def __init__(self, moves: Sequence[Sequence[int]], arrivals: Sequence[Sequence[int]]) -> None:
        self.moves = [Move(*move) for move in moves]
        self.arrivals = [(counted, seen) for counted, seen in arrivals]

    @property
    def last_arrival_ns(self) -> int:
        return max(counted for counted, _ in self.arrivals)

    @property
    def exposed_ns(self) -> int:
        """What was left to move when the last layer of the last chunk was done."""
        return self.last_arrival_ns - self.moves[-1].moved_ns


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds, over all repeats. `burner`: the process whose GIL a Python thread burns. `first_write`: from the
    word's move to the first write; `each_write`: between that layer's writes; `schedulable`: from the count to the
    engine's loop; `exposed`: from the last layer's end to the last write counted, of which `ideal` is what the last
    layer's bytes take at the full rate, and `beyond_ideal` the rest of the median."""

    load: str
    burner: str
    transfers: int
    writes: int
    first_write_p50: float
    first_write_p99: float
    each_write_p50: float
    schedulable_p50: float
    schedulable_p99: float
    exposed_p50: float
    exposed_p99: float
    layer_bytes: int
    ideal: float = 0.0
    beyond_ideal: float = 0.0

    def beside(self, bytes_per_ns: float) -> "Row":
        ideal = self.layer_bytes / bytes_per_ns / 1e3
        return replace(self, ideal=round(ideal, 1), beyond_ideal=round(self.exposed_p50 - ideal, 1))


def row(load: Load, burner: str, samples: Sequence[Sample]) -> Row:
    moves = [move for sample in samples for move in sample.moves]
    arrivals = [arrival for sample in samples for arrival in sample.arrivals]
    assert len(arrivals) == len(samples) * load.requests and len(moves) == len(samples) * load.chunks * LAYERS
    first = [move.first_ns - move.moved_ns for move in moves]
    each = [(move.last_ns - move.first_ns) / (move.writes - 1) for move in moves if move.writes > 1]
    schedulable = [seen - counted for counted, seen in arrivals]
    exposed = [sample.exposed_ns for sample in samples]
    us = {
        "first_write_p50": _us(first, 50),
        "first_write_p99": _us(first, 99),
        "each_write_p50": _us(each, 50),
        "schedulable_p50": _us(schedulable, 50),
        "schedulable_p99": _us(schedulable, 99),
        "exposed_p50": _us(exposed, 50),
        "exposed_p99": _us(exposed, 99),
    }
    writes = sum(move.writes for move in moves)
    return Row(load.name, burner, len(arrivals), writes, **us, layer_bytes=load.layer_bytes)


def _us(values: Sequence[float], percentile: int) -> float:
    """Of nanoseconds."""
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [*values] * 99
    return round(cuts[percentile - 1] / 1e3, 1)


COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("first write p50/p99", lambda r: f"{r['first_write_p50']:.0f} / {r['first_write_p99']:.0f}"),
    ("each write p50", lambda r: f"{r['each_write_p50']:.1f}"),
    ("schedulable p50/p99", lambda r: f"{r['schedulable_p50']:.0f} / {r['schedulable_p99']:.0f}"),
    ("exposed p50/p99", lambda r: f"{r['exposed_p50']:.0f} / {r['exposed_p99']:.0f}"),
    ("beyond ideal", lambda r: f"{r['beyond_ideal']:.0f} of {r['exposed_p50']:.0f}"),
)


def table(report: Mapping[str, Any]) -> str:
    lines = [f"{'us':<14}{'GIL burner':<12}" + "".join(f"{name:>22}" for name, _ in COLUMNS)]
    for one in report["rows"]:
        lines.append(f"{one['load']:<14}{one['burner']:<12}" + "".join(f"{show(one):>22}" for _, show in COLUMNS))
    shares = report["cpu_share"]
    lines.append(
        f"\nof a core: idle {shares['idle_prefill']:.1%} (prefill) and {shares['idle_decode']:.1%} (decode), "
        f"blocked {shares['blocked']:.1%}; {report['provider']}, pages of {report['page_bytes'] >> 10} KiB, "
        f"{report['gb_per_s']:.2f} GB/s when all is there at once"
    )
    return "\n".join(lines) + "\n"
