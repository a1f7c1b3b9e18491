"""What a simulated network does wrong, as a script: the same seed and script give the same run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Faults:
    """Steps count the network's own turns, writes and posts count from 1 over the whole network.

    reorder: deliver in seeded order, also within an endpoint (as EFA does). max_delay: steps that a write may stay
    in flight. busy_share: share of posts refused with EAGAIN, each the first of `busy_burst` refusals.
    fail_post: the post that fails at once. fail_completion: the write that is reported failed, delivered or not.
    fail_fence: the closing of a landing that fails, and leaves it open for whatever its peer sends.
    drop_immediate: the write whose bytes land but whose immediate is lost. stale_duplicates: how often, after an
    expectation was forgotten, its immediate comes once more (without bytes: those belong to somebody else now).
    """

    reorder: bool = False
    max_delay: int = 0
    busy_share: float = 0.0
    busy_burst: int = 1
    fail_post: int | None = None
    fail_completion: int | None = None
    drop_immediate: int | None = None
    fail_fence: int | None = None
    stale_duplicates: int = 0
