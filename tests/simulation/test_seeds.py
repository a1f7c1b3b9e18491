"""The default run: ten thousand seeds, and those that once failed. `make sim` runs more."""

import pytest

from tests.simulation.play import REGRESSIONS, SeedFailed, first_failure, regressions

SEEDS = 10_000
BATCH = 500


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_no_seed_breaks_the_protocol(first: int) -> None:
    _expect_green(range(first, first + BATCH))


def test_seeds_that_once_failed_stay_green() -> None:
    _expect_green(regressions())


def _expect_green(seeds: "range | list[int]") -> None:
    found = first_failure(seeds, len(seeds))
    if found is not None:
        raise _explained(found[1])


def _explained(failure: SeedFailed) -> AssertionError:
    again = f"python -m tests.simulation --seed {failure.seed} --trace"
    return AssertionError(f"{failure}\nagain: {again}\nkeep it: add it to {REGRESSIONS.name}")
