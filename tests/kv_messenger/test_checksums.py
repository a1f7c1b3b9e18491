"""Checksums of what was moved: equal for equal tokens, however pages and ranks cut them, and for nothing else."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from kv_messenger.checksums import HeldPages, checksums, first_difference, places
from protocol.layout import GroupLayout, KVLayout
from tests.kv_messenger.layouts import FULL, HYBRID, of
from tests.kv_messenger.moving import Side
from tests.kv_messenger.pairing import NAMES

TOKENS = 70


def side(layout: KVLayout, seed: int) -> Side:
    """With the KV of TOKENS tokens on every rank, and something else wherever nothing of it lies."""
    groups = range(len(layout.groups))
    made = Side(layout, [layout.pages_for(group, TOKENS) for group in groups], random.Random(seed))
    made.pools[:] = seed
    made.compute(0, TOKENS)
    made.pools %= NAMES
    return made


def sums(of_side: Side, target: KVLayout, sets: Sequence[int], first_page: int = 0) -> bytes:
    tables = [table[first_page:] for table in of_side.tables]
    held = HeldPages(of_side.layout, [pool.ctypes.data for pool in of_side.pools], tables, first_page)
    return checksums(held, sets, list(places(target, TOKENS, first_page)))


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize(("ranks", "page"), [(1, 16), (2, 64), (4, 48), (8, 4)])
def test_they_depend_on_no_cut(ranks: int, page: int, groups: tuple[GroupLayout, ...]) -> None:
    ours, theirs = of(4, 2, 16, groups), of(4, ranks, page, groups)
    source, target = side(ours, 5), side(theirs, 6)
    for replica_set in range(theirs.replica_sets):
        assert sums(source, theirs, [0]) == sums(target, theirs, [replica_set])


def test_pages_that_are_there_already_are_left_out() -> None:
    layout = of(4, 1, 16)
    whole = sums(side(layout, 5), layout, [0])
    rest = sums(side(layout, 6), layout, [0], first_page=2)
    assert rest == whole[8:20] + whole[28:40], "3 of the 5 pages of 2 layers"


def test_the_first_difference_is_named() -> None:
    layout = of(2, 4, 16)
    one, other = side(layout, 5), side(layout, 5)
    where = other.at(group=0, ordinal=1, rank=3, head=1, part=0, slots=np.array([33]))
    other.pools[3, where] += 1
    moved = list(places(layout, TOKENS, 0))
    assert first_difference(sums(one, layout, [0, 1]), sums(one, layout, [0, 1]), moved) is None
    named = first_difference(sums(other, layout, [0, 1]), sums(one, layout, [0, 1]), moved)
    assert named == "page 2 of layer 1 in replica set 1 is not its source's"


def test_another_number_of_them_is_a_difference() -> None:
    assert first_difference(b"1234", b"12341234", []) == "2 checksums came, of 1"
