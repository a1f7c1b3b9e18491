"""The benchmark stops real processes, and counts what arrives meanwhile; at which rates is not tested."""

import json

import pytest

from bench.stall import RECEIVERS, Lengths, main, measure, report, star
from bench.stall_rows import PHASES, Load, Turn, Window, table
from bench.stall_shape import TRANSFER_BYTES

MS = 1_000_000


def arrivals(every_ms: int, took_ms: int) -> list[list[int]]:
    """Over four seconds."""
    return [[at * MS - took_ms * MS, at * MS] for at in range(0, 4000, every_ms)]


def windows() -> dict[str, Window]:
    """A second each."""
    return {phase: Window(number * 1000 * MS, (number + 1) * 1000 * MS) for number, phase in enumerate(PHASES)}


def test_rates_are_of_the_living_and_of_their_own_before() -> None:
    slower = [pair for pair in arrivals(10, 20) if pair[1] < 1000 * MS or pair[1] % (20 * MS) == 0]
    load = Load("net", "paced", 100, [Turn(2, windows(), [arrivals(20, 5), slower, []], failed=3)])
    before, stopped, *_ = load.rows()
    assert (before.ratios, stopped.ratios) == ([1.0, 1.0], [1.0, 0.5])
    assert (before.transfers_per_s, stopped.transfers_per_s) == (150, 100)
    assert before.gb_per_s == round(150 * TRANSFER_BYTES / 1e9, 3)
    assert (stopped.p50_ms, stopped.p99_ms) == (12.5, 20.0)
    assert stopped.figures["ratio"] == 0.75


def test_what_became_of_the_stopped_is_told() -> None:
    victim = [pair for pair in arrivals(10, 5) if not 1000 * MS <= pair[1] < 3000 * MS]
    load = Load("net", "paced", 100, [Turn(0, windows(), [victim, arrivals(10, 5), arrivals(10, 5)], failed=3)])
    assert load.victims == {"lost_after_s": [1.0], "back_after_s": [0.0], "back_ratio": [1.0], "failed": [3]}
    assert "net paced: given up after 1.0 s" in table(report([load], in_flight=8))


@pytest.mark.slow
def test_every_receiver_of_real_processes_is_written_to_as_often_as_it_asks() -> None:
    with star("same-host", in_flight=2) as processes:
        for wanted, per_s in ((8, 0.0), (16, 50.0)):
            with processes.loaded(per_s):
                while min(decode.ask(do="count")["arrived"] for decode in processes.decodes) < wanted:
                    pass
            taken = [decode.ask(do="take") for decode in processes.decodes]
            assert [of["failed"] for of in taken] == [0] * RECEIVERS
            assert all(due < there for of in taken for due, there in of["arrivals"])
        while (count := processes.prefill.ask(do="count"))["transfers"]:
            pass
        assert count == {"lost": 0, "sessions": RECEIVERS, "transfers": 0, "outstanding": 0}


@pytest.mark.slow
def test_one_that_was_stopped_is_given_up_and_comes_back() -> None:
    (saturated, paced) = measure("same-host", 2, 1, Lengths(settle=0.2, window=0.5))
    assert paced.per_s > 0
    for load in (saturated, paced):
        (turn,) = load.turns
        assert turn.windows["stopped"].seconds > 1
        assert not turn.windows["lost"].of(turn.arrivals[turn.victim])
        assert all(turn.windows[phase].of(turn.arrivals[receiver]) for phase in PHASES for receiver in turn.living)
        assert turn.windows["back"].of(turn.arrivals[turn.victim])


@pytest.mark.slow
def test_a_run_prints_json_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--provider", "net", "--repeats", "1"]) == 0
    told, _, printed = capsys.readouterr().out.partition("\n\n")
    assert len(json.loads(told)["rows"]) == 2 * len(PHASES)
    assert printed == table(json.loads(told))
