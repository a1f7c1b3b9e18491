"""A simulation that finds nothing proves something only if it finds what is there: each mutant turns it red."""

from itertools import count

import pytest

from tests.simulation.mutants import MUTANTS, planted
from tests.simulation.play import SeedFailed, first_failure, play

AT_MOST = 2000


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_turns_the_simulation_red(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with planted(MUTANTS[name]):
        found = first_failure(count(), AT_MOST)
    assert found is not None, f"{name}: {AT_MOST} seeds are green"
    seeds, failure = found
    with capsys.disabled():
        print(f"\n{name}: red at seed {seeds} of {AT_MOST}: {failure}")  # noqa: T201 - how strong the simulation is
    play(failure.seed)


def test_a_failing_seed_fails_again_with_the_same_trace() -> None:
    with planted(MUTANTS["skip the fence"]):
        found = first_failure(count(), AT_MOST)
        assert found is not None
        seed, first, second = found[1].seed, list[str](), list[str]()
        for trace in (first, second):
            with pytest.raises(SeedFailed) as caught:
                play(seed, trace.append)
            trace.append(str(caught.value))
    assert first == second and str(found[1]) == first[-1]
    assert any("everything is healed" in line for line in first)
