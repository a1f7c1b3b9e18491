"""The benchmark drives the real messenger, and accounts for each write and each arrival; how fast is not tested."""

import json

import pytest

from bench.messenger import BURNERS, IN_FLIGHT, LOADS, pair, rate
from bench.messenger_rows import Load, Sample, row, table
from bench.messenger_shape import LAYERS, LAYOUT

SMALL = Load("a few", requests=3, pages=4, chunks=2, layer_us=100, repeats=1)


def test_every_write_and_every_arrival_of_real_processes_is_accounted_for() -> None:
    with pair("", [SMALL]) as both:
        sample = both.move(SMALL)
        both.burn("decode", True)
        burned = both.move(SMALL)
        both.burn("decode", False)
        assert rate(both, SMALL, 1) > 0
        shares = both.shares(rest_s=0.05, blocked_s=0.05)
    for one in (sample, burned):
        assert [move.writes for move in one.moves] == [SMALL.requests * 2] * SMALL.chunks * LAYERS
        assert all(move.moved_ns <= move.first_ns <= move.last_ns for move in one.moves)
        assert len(one.arrivals) == SMALL.requests
        assert all(one.moves[-1].first_ns <= counted <= seen for counted, seen in one.arrivals)
    assert min(shares.idle_prefill, shares.idle_decode, shares.blocked) >= 0


def test_a_row_is_in_microseconds_over_all_moves_and_arrivals() -> None:
    load = Load("one", requests=1, pages=2, chunks=1, layer_us=1, repeats=2)
    moves = [[1_000 * n, 1_000 * n + 500, 1_000 * n + 600, 2] for n in range(1, LAYERS + 1)]
    end = moves[-1][0]
    one = row(load, "none", [Sample(moves, [[end + 9_000, end + 12_000]])] * 2)
    assert (one.transfers, one.writes) == (2, 2 * 2 * LAYERS)
    assert (one.first_write_p50, one.first_write_p99, one.each_write_p50) == (0.5, 0.5, 0.1)
    assert (one.schedulable_p50, one.exposed_p50, one.layer_bytes) == (3.0, 9.0, 2 * LAYOUT.page_bytes)
    beside = one.beside(bytes_per_ns=2 * LAYOUT.page_bytes / 4_000)
    assert (beside.ideal, beside.beyond_ideal) == (4.0, 5.0)


def test_the_loads_are_those_of_the_goals() -> None:
    assert BURNERS[0] == "none" and len(BURNERS) == 3
    assert max(load.requests for load in LOADS) == IN_FLIGHT == 64
    assert all(not load.pages % load.chunks for load in LOADS)


@pytest.mark.slow
def test_a_quick_run_prints_json_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    from bench.messenger import main

    assert main(["--quick"]) == 0
    report, _, printed = capsys.readouterr().out.partition("\n\n")
    assert len(json.loads(report)["rows"]) == len(LOADS) * len(BURNERS)
    assert printed == table(json.loads(report))
