"""Whom to start over when the pool is full. Pure: counts in, victims out."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.request import Request


@dataclass(frozen=True)
class StalledRequest:
    """`held`: blocks that it would give back. `missing`: blocks that it lacks for what it was to run."""

    request: Request
    held: int
    missing: int


def choose_victims(stalled: Sequence[StalledRequest], free: int, active: int) -> list[Request]:
    """The newest stalled requests, oldest last, as few as let the other stalled ones go on.

    One active request always remains. Requests that did not stall are never chosen.
    """
    victims: list[Request] = []
    remaining = list(stalled)
    while remaining and active - len(victims) > 1:
        victim = remaining.pop()
        victims.append(victim.request)
        free += victim.held
        if sum(other.missing for other in remaining) <= free:
            break
    return victims
