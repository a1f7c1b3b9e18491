"""Forwards captured once and replayed: a launch then costs the host one call."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol

Replay = Callable[[], None]
MAX_GRAPHS = 256
"""The least recently used goes first."""


class Capture(Protocol):
    """How one device records work."""

    def __call__(self, forward: Callable[[], None]) -> Replay:
        """Records what `forward` launches without running it. The result runs it on the same memory, with whatever is
        in it then: all that changes between two runs must lie in buffers that never move."""


class GraphCache:
    """Of the forwards over one set of buffers. Not for use by two threads at once."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._graphs: OrderedDict[Hashable, Replay] = OrderedDict()
        self.captures = 0
        self.replays = 0

    def run(self, key: Hashable, forward: Callable[[], None]) -> None:
        """`key` tells forwards apart that may not share a graph. The first one of a key runs as it is, which also warms
        up whatever must not happen while recording, and is then captured: each forward runs exactly once."""
        replay = self._graphs.get(key)
        if replay:
            self._graphs.move_to_end(key)
            self.replays += 1
            replay()
            return
        forward()
        self._graphs[key] = self._capture(forward)
        self.captures += 1
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
