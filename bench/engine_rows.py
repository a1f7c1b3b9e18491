"""Figures of `python -m bench engine`, and what may be concluded from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.engine_cells import Cell
from bench.peers.lines import Served

OURS = "kvferry"
FIRST_TOKEN_S = 2.0
TOKEN_S = 0.2
"""What a request must keep within to count for goodput: time to its first token, time per token after it."""


@dataclass(frozen=True, slots=True)
class Row:
    """`tokens_per_s`: one per repeat, in order; prompt tokens in prefill cells, else generated ones."""

    phase: str
    batch: int
    context: int
    implementation: str
    tokens_per_s: list[float]
    median: float


@dataclass(frozen=True, slots=True)
class MixedRow:
    """Of the mixed load, medians over the repeats. `goodput`: requests a second that kept within both limits."""

    implementation: str
    rate: float
    ttft_p50_s: float
    tpot_p50_s: float
    goodput: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """kvferry's figure over another's, paired by repeat: median, and the least and the greatest."""

    median: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.low <= 1.0 <= self.high:
            return "tie"
        return "ahead" if self.median > 1.0 else "behind"


def row(cell: Cell, implementation: str, figures: Sequence[float]) -> Row:
    return Row(cell.phase, cell.batch, cell.context, implementation, list(figures), median(figures))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    paired = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Ratio(median(paired), min(paired), max(paired))


def throughput(served: Sequence[Served]) -> float:
    """Generated tokens a second, from the first arrival to the last token."""
    return sum(one.tokens for one in served) / (max(one.last for one in served) - served[0].at)


def mixed_row(implementation: str, rate: float, repeats: Sequence[Sequence[Served]]) -> MixedRow:
    everyone = [one for served in repeats for one in served]
    return MixedRow(
        implementation,
        rate,
        median(_first_token_s(one) for one in everyone),
        median(_token_s(one) for one in everyone),
        median(_goodput(served) for served in repeats),
    )


def table(rows: Sequence[Row]) -> str:
    """A line per cell and implementation, ours first, with the ratio of ours to it."""
    lines = [f"{'phase':<8}{'batch':>6}{'context':>8}  {'implementation':<16}{'tokens/s':>9}   kvferry is"]
    ours = {_cell_of(one): one for one in rows if one.implementation == OURS}
    for one in rows:
        line = f"{one.phase:<8}{one.batch:>6}{one.context:>8}  {one.implementation:<16}{one.median:>9.1f}"
        mine = ours.get(_cell_of(one))
        if mine is not None and mine is not one and len(mine.tokens_per_s) == len(one.tokens_per_s):
            r = ratio(mine.tokens_per_s, one.tokens_per_s)
            line += f"   {r.median:>5.2f} x  ({r.low:.2f} - {r.high:.2f})  {r.verdict}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def mixed_table(rows: Sequence[MixedRow]) -> str:
    lines = [f"mixed load   {'implementation':<16}{'TTFT p50 s':>11}{'TPOT p50 s':>11}{'goodput req/s':>14}"]
    for one in rows:
        lines.append(
            f"             {one.implementation:<16}{one.ttft_p50_s:>11.2f}{one.tpot_p50_s:>11.3f}{one.goodput:>14.2f}"
        )
    return "\n".join(lines) + "\n"


def missing_table(missing: Mapping[str, str]) -> str:
    return "".join(f"missing: {name}: {reason}\n" for name, reason in missing.items())


def _cell_of(one: Row) -> tuple[str, int, int]:
    return one.phase, one.batch, one.context


def _first_token_s(one: Served) -> float:
    return one.first - one.at


def _token_s(one: Served) -> float:
    return (one.last - one.first) / max(one.tokens - 1, 1)


def _goodput(served: Sequence[Served]) -> float:
    kept = sum(_first_token_s(one) <= FIRST_TOKEN_S and _token_s(one) <= TOKEN_S for one in served)
    return kept / (max(one.last for one in served) - served[0].at)
