"""How a prompt's tokens are cut into writes where the two sides' pages may differ in size. Pure.

A run is the tokens that lie in one page on either side, so its bytes (of one head and part) are contiguous on both. It
is cut by nothing else: neither block ids nor prefill chunks change the number of runs.

    source, 48 tokens a page   |---------- 0 ----------|---------- 1 ----------|----- 2 ...
    target, 64 tokens a page   |-------------- 0 --------------|-------------- 1 ----- ...
    runs                       |-----------------------|-------|---------------|------ ...
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from protocol.layout import GroupLayout


class Run(NamedTuple):
    """`length` tokens from slot `source_slot` of page `source_page` to slot `target_slot` of page `target_page`; pages
    are counted from the start of the request. `ready`: the prompt's tokens that must be computed before."""

    ready: int
    source_page: int
    source_slot: int
    target_page: int
    target_slot: int
    length: int


def runs(group: GroupLayout, source_page: int, target_page: int, tokens: int, first_page: int) -> Iterator[Run]:
    """In order. `source_page`, `target_page`: tokens a page. A group that slides is written when the prompt ends: until
    then its slots are still being overwritten."""
    start, end = first_page * target_page, group.slots(tokens)
    while start < end:
        stop = min((start // source_page + 1) * source_page, (start // target_page + 1) * target_page, end)
        ready = stop if group.window is None else tokens
        yield Run(ready, *divmod(start, source_page), *divmod(start, target_page), stop - start)
        start = stop


def count_runs(group: GroupLayout, source_page: int, target_page: int, tokens: int, first_page: int) -> int:
    """How many `runs` there are, by arithmetic."""
    start, end = first_page * target_page, group.slots(tokens)
    if start >= end:
        return 0
    both = math.lcm(source_page, target_page)
    inside = [(end - 1) // size - start // size for size in (source_page, target_page, both)]
    return 1 + inside[0] + inside[1] - inside[2]


class RunCursor:
    """Hands out each run of a group once, as the prompt is computed."""

    def __init__(self, ordered: Iterator[Run]) -> None:
        self._rest = ordered
        self._next = next(ordered, None)

    def take(self, computed: int) -> list[Run]:
        """Those that are ready with `computed` tokens and were not taken before."""
        taken = []
        while self._next is not None and self._next.ready <= computed:
            taken.append(self._next)
            self._next = next(self._rest, None)
        return taken
