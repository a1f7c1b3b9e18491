"""Counters of several parts."""

from dataclasses import dataclass

from protocol.counts import added


@dataclass(frozen=True)
class Ferried:
    requests: int = 0
    seconds: float = 0.0


def test_counts_are_added_field_by_field() -> None:
    assert added([Ferried(2, 0.5), Ferried(), Ferried(3, 1.25)]) == Ferried(5, 1.75)


def test_one_part_is_its_own_sum() -> None:
    assert added([Ferried(2, 0.5)]) == Ferried(2, 0.5)
