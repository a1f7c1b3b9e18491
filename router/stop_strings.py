"""Ends an output at the first stop string, however the text is cut into pieces.

The stop string that is complete first wins; of several complete at the same character, the one that began first.
Text that might be the beginning of a stop string is held back until it is or is not one.
"""

from collections.abc import Sequence


class StopMatcher:
    """One output's state. After `feed` returned matched=True the output is over."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string is complete."""
        window = self._held + text
        start = self._first_match(window)
        if start is not None:
            self._held = ""
            return window[:start], True
        keep = self._possible_beginning(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep], False

    def finish(self) -> str:
        """The output ended otherwise: what was held back is ordinary text."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, window: str) -> int | None:
        """Where the winning stop string begins."""
        found = ((window.find(stop), stop) for stop in self._stops)
        ends = [(start + len(stop), start) for start, stop in found if start >= 0]
        return min(ends)[1] if ends else None

    def _possible_beginning(self, window: str) -> int:
        """Length of the longest tail of `window` that begins a stop string."""
        for length in range(min(self._longest - 1, len(window)), 0, -1):
            tail = window[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
