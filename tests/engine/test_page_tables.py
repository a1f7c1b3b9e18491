"""Block tables in flat arrays: pages, what the last of them holds, and where new tokens go."""

import pytest

from engine.attention.page_tables import page_tables, places
from engine.forward_batch import BatchRow
from engine.geometry import AttentionType, CacheGeometry, LayerGroup

GROUPS = (LayerGroup(AttentionType.FULL, (2,)), LayerGroup(AttentionType.SLIDING, (0, 1), window=6))
GEOMETRY = CacheGeometry(4, kv_heads=1, head_dim=8, dtype="float16", groups=GROUPS)


def row(start: int, count: int, full: list[int], ring: list[int]) -> BatchRow:
    return BatchRow("r", start, [0] * count, [full, ring])


ROWS = [row(3, 2, [7, 3, 9], [5, 6]), row(0, 4, [8], [4]), row(10, 1, [1, 2, 6], [2, 3])]


def test_full_tables_are_cut_to_the_pages_that_hold_something() -> None:
    tables = page_tables(ROWS, 0, GEOMETRY)
    assert tables.query_starts.tolist() == [0, 2, 6, 7]
    assert tables.page_starts.tolist() == [0, 2, 3, 6]
    assert tables.pages.tolist() == [7, 3, 8, 1, 2, 6]
    assert tables.last_page_tokens.tolist() == [1, 4, 3]
    assert {part.dtype.name for part in tables} == {"int32"}


def test_a_rings_table_holds_no_more_than_the_window() -> None:
    tables = page_tables(ROWS, 1, GEOMETRY)
    assert tables.pages.tolist() == [5, 6, 4, 2, 3]
    assert tables.last_page_tokens.tolist() == [1, 4, 2], "5 tokens, 4, and a window of 6"


def test_missing_rows_ask_nothing_and_see_a_zero() -> None:
    tables = page_tables(ROWS, 0, GEOMETRY, count=5)
    assert tables.query_starts.tolist() == [0, 2, 6, 7, 7, 7]
    assert tables.pages.tolist()[-2:] == [0, 0]
    assert tables.last_page_tokens.tolist()[-2:] == [1, 1]


def test_new_tokens_go_to_the_page_of_their_position() -> None:
    where = places(ROWS, 0, GEOMETRY)
    assert list(zip(where.blocks.tolist(), where.slots.tolist(), strict=True)) == [
        *[(7, 3), (3, 0)],
        *[(8, 0), (8, 1), (8, 2), (8, 3)],
        (6, 2),
    ]


def test_in_a_ring_they_go_to_their_position_modulo_the_window() -> None:
    where = places([row(11, 2, [0, 0, 0, 0], [5, 6])], 1, GEOMETRY)
    assert list(zip(where.blocks.tolist(), where.slots.tolist(), strict=True)) == [(6, 1), (5, 0)]
    with pytest.raises(AssertionError, match="each other's slots"):
        places([row(0, 7, [0, 0], [5, 6])], 1, GEOMETRY)
