"""Where a sliding layer keeps its last `window` tokens: a ring of slots per request. Pure index arithmetic.

position p -> slot p mod window -> page (slot div page_size) of the request's table, token (slot mod page_size) in it

window 6, page_size 4, position 10 is next:   slot      |  0   1   2   3 |  4   5  -  - |
                                              position  |  6   7   8   9 |  4   5       |
It sees 5..9, read from slots 5, 0, 1, 2, 3, and is then written to slot 4, where 4 was.
"""

from collections.abc import Iterable


def cached_positions(start: int, window: int) -> range:
    """What the queries at `start` and later can still see of the positions before it; of these, the ring has all. They
    must be read before the new tokens are written, which takes their slots."""
    return range(max(0, start - window + 1), start)


def stored_positions(start: int, end: int, window: int) -> range:
    """Which of the new tokens at `start`...`end` go into the ring: the earlier ones nobody will ask for."""
    return range(max(start, end - window), end)


def slots(positions: Iterable[int], window: int) -> list[int]:
    return [position % window for position in positions]
