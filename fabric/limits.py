"""The bounds of one transfer engine."""

from dataclasses import dataclass

MAX_RAILS = 32
"""That one engine uses side by side."""


@dataclass(frozen=True, slots=True)
class Limits:
    """endpoint_writes: writes outstanding on one rail of an endpoint. domain_writes: in all, times rails; but each
    endpoint with anything to post, or on its way, may always have its equal share of them, and one at least, so that
    stalled peers cannot slow down another. connect_seconds: an endpoint that could not post for so long, with nothing
    outstanding, has failed; a tenth of it once it was connected.
    """

    endpoint_writes: int = 64
    domain_writes: int = 512
    connect_seconds: float = 5.0
