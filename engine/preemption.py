"""Who has to make room when the pool is full. Pure: counts in, victims out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.request import Request


@dataclass(frozen=True)
class StalledRequest:
    """By layer group, `held`: blocks that would come free without it; `missing`: blocks that it lacks to go on."""

    request: Request
    held: tuple[int, ...]
    missing: tuple[int, ...]


Fits = Callable[[Sequence[int], Sequence[int]], bool]
"""(blocks given back, blocks wanted), both by group -> whether the wanted ones would be there"""


def choose_victims(stalled: Sequence[StalledRequest], fits: Fits, active: int) -> list[StalledRequest]:
    """The newest stalled requests of the least urgent priority, as few as let the other stalled ones go on.

    One active request always remains. Requests that did not stall are never chosen.
    """
    victims: list[StalledRequest] = []
    remaining = sorted(stalled, key=lambda s: s.request.priority)
    while remaining and active - len(victims) > 1:
        victims.append(remaining.pop())
        if not remaining or fits(_sums([v.held for v in victims]), _sums([r.missing for r in remaining])):
            break
    return victims


def _sums(counts: Sequence[tuple[int, ...]]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)]
