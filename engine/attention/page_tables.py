"""Block tables of many rows as kernels take them: one after the other in flat arrays. Pure, on the host.

rows with pages [7 3] and [5]:   page_starts 0 2 3   pages 7 3 5   last_page_tokens: of page 3, and of page 5
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.forward_batch import BatchRow
from engine.geometry import READ_PADDING_CHUNK, CacheGeometry

Ints = npt.NDArray[np.int32]


class PageTables(NamedTuple):
    """Of one group. `query_starts` and `page_starts` `[rows + 1]`, `pages` `[their sum]`, `last_page_tokens` `[rows]`.
    Of a ring that has wrapped, pages are not in order of position: an attention that does not ask which key is older,
    such as one query's that sees them all, may read it."""

    query_starts: Ints
    page_starts: Ints
    pages: Ints
    last_page_tokens: Ints


class Places(NamedTuple):
    """Of the packed tokens: token i goes to slot `slots[i]` of block `blocks[i]`. int64 `[T]`."""

    blocks: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]


def page_tables(rows: Sequence[BatchRow], group: int, geometry: CacheGeometry, count: int | None = None) -> PageTables:
    """Of the KV that each row has once its new tokens are written. `count`: rows in all; those that are missing have no
    query and see one token of the chunk of zeros."""
    size, window = geometry.page_size, geometry.groups[group].window
    missing = (count or len(rows)) - len(rows)
    held = [row.end if window is None else min(row.end, window) for row in rows] + [1] * missing
    tables = [row.tables[group][: -(-tokens // size)] for row, tokens in zip(rows, held, strict=False)]
    tables += [[READ_PADDING_CHUNK]] * missing
    queries = [len(row.tokens) for row in rows] + [0] * missing
    return PageTables(
        query_starts=_starts(queries),
        page_starts=_starts([len(table) for table in tables]),
        pages=np.concatenate([np.asarray(table, np.int32) for table in tables]),
        last_page_tokens=np.array([(tokens - 1) % size + 1 for tokens in held], np.int32),
    )


def places(rows: Sequence[BatchRow], group: int, geometry: CacheGeometry) -> Places:
    """Where the new tokens go. In a ring, a row has no more new tokens than its window has slots."""
    size, window = geometry.page_size, geometry.groups[group].window
    blocks, slots = [], []
    for row in rows:
        positions = np.arange(row.start, row.end)
        if window is not None:
            assert len(positions) <= window, "tokens of one row would take each other's slots"
            positions %= window
        blocks.append(np.asarray(row.tables[group], np.int64)[positions // size])
        slots.append(positions % size)
    return Places(np.concatenate(blocks), np.concatenate(slots))


def _starts(counts: Sequence[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
