"""Figures of `python -m bench stall`, from when transfers were due and when they had arrived."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any

from bench.stall_shape import TRANSFER_BYTES

BEFORE, PHASES = "before", ("before", "stopped", "lost", "back")
"""Stopped: until its session is given up; lost: from then on; back: once its transfers go on."""

Arrivals = Sequence[Sequence[int]]
"""(due, arrived), CLOCK_MONOTONIC."""


@dataclass(frozen=True, slots=True)
class Window:
    began_ns: int
    ended_ns: int

    def of(self, arrivals: Arrivals) -> list[int]:
        """How long each took that arrived meanwhile, in nanoseconds."""
        return [there - due for due, there in arrivals if self.began_ns <= there < self.ended_ns]

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Turn:
    """One stop of `victim`. `arrivals`: of each receiver. `failed`: transfers of the victim."""

    victim: int
    windows: Mapping[str, Window]
    arrivals: Sequence[Arrivals]
    failed: int

    @property
    def living(self) -> list[int]:
        return [receiver for receiver in range(len(self.arrivals)) if receiver != self.victim]

    def rate(self, phase: str, receiver: int) -> float:
        """Transfers a second."""
        window = self.windows[phase]
        return len(window.of(self.arrivals[receiver])) / window.seconds

    def ratio(self, phase: str, receiver: int) -> float:
        """Of its rate before."""
        return self.rate(phase, receiver) / self.rate(BEFORE, receiver)


@dataclass(frozen=True, slots=True)
class Row:
    """Of the receivers that were not stopped, over all turns: `ratios` to their rate before, one for each of them and
    each turn; their rates together; and how long a transfer took, in milliseconds."""

    provider: str
    load: str
    phase: str
    ratios: list[float]
    gb_per_s: float
    transfers_per_s: float
    p50_ms: float
    p99_ms: float

    @property
    def figures(self) -> dict[str, object]:
        low, high = min(self.ratios), max(self.ratios)
        return {**asdict(self), "ratio": round(median(self.ratios), 3), "low": low, "high": high}


@dataclass(slots=True)
class Load:
    """`per_s`: transfers a second that each receiver asks for; 0: as many as it can have."""

    provider: str
    name: str
    per_s: float
    turns: list[Turn] = field(default_factory=list)

    def rows(self) -> list[Row]:
        return [self._row(phase) for phase in PHASES]

    @property
    def victims(self) -> dict[str, Any]:
        """What became of those that were stopped: `back_ratio`, of its rate before, once it was back."""
        windows = [turn.windows for turn in self.turns]
        return {
            "lost_after_s": [round(of["stopped"].seconds, 2) for of in windows],
            "back_after_s": [round((of["back"].began_ns - of["lost"].ended_ns) / 1e9, 2) for of in windows],
            "back_ratio": [round(turn.ratio("back", turn.victim), 2) for turn in self.turns],
            "failed": [turn.failed for turn in self.turns],
        }

    def _row(self, phase: str) -> Row:
        each = [(turn, receiver) for turn in self.turns for receiver in turn.living]
        took = [ns for turn, receiver in each for ns in turn.windows[phase].of(turn.arrivals[receiver])]
        together = median(sum(turn.rate(phase, receiver) for receiver in turn.living) for turn in self.turns)
        ratios = [round(turn.ratio(phase, receiver), 3) for turn, receiver in each]
        rate = round(together * TRANSFER_BYTES / 1e9, 3)
        return Row(self.provider, self.name, phase, ratios, rate, round(together, 1), _ms(took, 50), _ms(took, 99))


def _ms(nanoseconds: Sequence[int], percentile: int) -> float:
    return round(quantiles(nanoseconds, n=100, method="inclusive")[percentile - 1] / 1e6, 2)


def table(report: Mapping[str, Any]) -> str:
    lines = [f"{'provider':<14}{'load':<12}{'phase':<10}{'of the rate before':>24}{'GB/s':>8}{'p50 / p99 ms':>18}"]
    lines += [_line(row) for row in report["rows"]]
    lines += [f"{of['provider']} {of['load']}: {_told(of)}" for of in report["victims"]]
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    ratio = f"{row['ratio']:.2f} ({row['low']:.2f}-{row['high']:.2f})"
    took = f"{row['p50_ms']:.1f} / {row['p99_ms']:.1f}"
    return f"{row['provider']:<14}{row['load']:<12}{row['phase']:<10}{ratio:>24}{row['gb_per_s']:>8.2f}{took:>18}"


def _told(victims: Mapping[str, Any]) -> str:
    def of(values: Iterable[float]) -> str:
        return ", ".join(map(str, values))

    return (
        f"given up after {of(victims['lost_after_s'])} s, back {of(victims['back_after_s'])} s after it went on, "
        f"then at {of(victims['back_ratio'])} of its rate before"
    )
