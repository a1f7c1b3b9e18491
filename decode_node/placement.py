"""Which of a decode node's engines serves which request."""

import threading


class Placement:
    """From any thread. A request has its place until it ended."""

    def __init__(self, engines: int) -> None:
        self._lock = threading.Lock()
        self._held = [0] * engines
        self._place: dict[str, int] = {}

    def place(self, request: str) -> int:
        """The engine with the fewest requests; for one that has a place already, that."""
        with self._lock:
            if request not in self._place:
                engine = min(range(len(self._held)), key=self._held.__getitem__)
                self._place[request] = engine
                self._held[engine] += 1
            return self._place[request]

    def leave(self, request: str) -> None:
        """Unknown ones are ignored."""
        with self._lock:
            engine = self._place.pop(request, None)
            if engine is not None:
                self._held[engine] -= 1
