"""Ratios are paired by repeat, and a spread over 1 is a tie."""

import pytest

from bench.engine_cells import Cell, Phase
from bench.engine_rows import MixedRow, missing_table, mixed_row, mixed_table, ratio, row, table, throughput
from bench.peers.lines import Served

DECODE = Cell(Phase.DECODE, 8, 512)


def test_a_ratio_is_the_median_of_pairs_with_its_spread() -> None:
    # The machine slowed down by half in the last repeat: both did.
    one = ratio([30.0, 33.0, 15.0], [10.0, 11.0, 5.0])
    assert (one.median, one.low, one.high) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize(
    ("ours", "verdict"), [([2.0, 3.0], "ahead"), ([0.5, 0.9], "behind"), ([0.9, 1.2], "tie"), ([1.0, 1.0], "tie")]
)
def test_the_verdict_looks_at_the_whole_spread(ours: list[float], verdict: str) -> None:
    assert ratio(ours, [1.0, 1.0]).verdict == verdict


def test_the_table_compares_each_engine_with_ours_in_the_same_cell() -> None:
    rows = [row(DECODE, "kvferry", [60.0, 66.0]), row(DECODE, "generate", [20.0, 22.0])]
    lines = table(rows).splitlines()
    assert len(lines) == 3
    assert "ahead" not in lines[1]
    assert "3.00 x" in lines[2] and "ahead" in lines[2]


def test_throughput_runs_from_the_first_arrival_to_the_last_token() -> None:
    assert throughput([Served(0.5, 1.0, 2.0, 10), Served(0.6, 1.5, 4.5, 30)]) == pytest.approx(10.0)


def test_goodput_counts_requests_within_both_limits() -> None:
    good = Served(0.0, 1.0, 2.0, 11)
    late = Served(0.0, 3.0, 4.0, 11)
    slow = Served(0.0, 1.0, 4.0, 11)
    one = mixed_row("kvferry", 0.8, [[good, late, slow]])
    assert one == MixedRow("kvferry", 0.8, 1.0, 0.1, 0.25)
    assert len(mixed_table([one]).splitlines()) == 2


def test_what_is_missing_is_said_with_its_reason() -> None:
    assert missing_table({"vllm_cpu": "not installed"}) == "missing: vllm_cpu: not installed\n"
