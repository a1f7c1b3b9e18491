"""Which of a decode node's engines serves which request."""

import threading


class Placement:
    """From any thread. A request has its place until each time that it came has had its end: one that comes twice is
    refused once, while it runs."""

    def __init__(self, engines: int) -> None:
        self._lock = threading.Lock()
        self._held = [0] * engines
        self._places: dict[str, list[int]] = {}
        """By request, its engine, once for each time it came."""

    def place(self, request: str) -> int:
        """The engine with the fewest requests; for one that has a place already, that."""
        with self._lock:
            places = self._places.setdefault(request, [])
            places.append(places[0] if places else min(range(len(self._held)), key=self._held.__getitem__))
            self._held[places[0]] += 1
            return places[0]

    def leave(self, request: str) -> None:
        """Unknown ones are ignored."""
        with self._lock:
            places = self._places.get(request)
            if places is None:
                return
            self._held[places.pop()] -= 1
            if not places:
                del self._places[request]
