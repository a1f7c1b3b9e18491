"""Rails: several NICs, or interfaces, that carry the pages of one engine together.

    our rails      r0    r1    r2    r3          r0    r1          r0    r1    r2    r3
                    |     |     |     |           |     |           |  .--'-----'-- ...
    the peer's     r0    r1    r2    r3          r2    r3          r0    r1
                   as many: each to its like     fewer: by chance  more: i to i mod n

A memory is registered on all rails, or on those that are near to it; a batch of writes takes the lanes between the
rails of its source and those of its target by turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fabric.api import RailKey
from fabric.errors import FabricUsageError


@dataclass(frozen=True, slots=True)
class Rail:
    """`node`: the interface's address. `domain`: the NIC, by what libfabric's name of it begins with; None: whichever
    has that address."""

    node: str
    domain: str | None = None

    def __str__(self) -> str:
        return f"{self.domain} ({self.node})" if self.domain else self.node


class Lane(NamedTuple):
    """A way for writes: from our rail to the peer's, with its key for the target."""

    rail: int
    remote: RailKey


def lanes(rails: Sequence[int], keys: Sequence[RailKey], chance: int) -> list[Lane]:
    """One for each of our rails. `chance`: any number, by which rails that are fewer than the peer's choose among them.
    Raises FabricUsageError for a target that no rail reaches."""
    if not keys:
        raise FabricUsageError("the target is registered on no rail")
    start = chance % len(keys) if len(rails) < len(keys) else 0
    return [Lane(rail, keys[(start + index) % len(keys)]) for index, rail in enumerate(rails)]
