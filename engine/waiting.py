"""The order in which waiting requests are considered."""

from collections.abc import Iterator
from itertools import chain, zip_longest

from engine.request import Request


class WaitingQueue:
    """By priority, lower first; within one priority, those whose KV is in host memory and the others take turns, each
    in order of arrival, the former beginning."""

    def __init__(self) -> None:
        self._lines: dict[int, dict[str, Request]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, request: Request) -> bool:
        return self._lines.get(request.priority, {}).get(request.id) is request

    def __iter__(self) -> Iterator[Request]:
        """The queue may change meanwhile: this is the order at the beginning."""
        lines = [self._lines[priority] for priority in sorted(self._lines)]
        return chain.from_iterable(_taking_turns(line) for line in lines)

    def append(self, request: Request) -> None:
        self._lines.setdefault(request.priority, {})[request.id] = request
        self._count += 1

    def discard(self, request: Request) -> None:
        if request not in self:
            return
        line = self._lines[request.priority]
        del line[request.id]
        self._count -= 1
        if not line:
            del self._lines[request.priority]


def _taking_turns(line: dict[str, Request]) -> list[Request]:
    offloaded = [request for request in line.values() if request.offloaded]
    if not offloaded:
        return list(line.values())
    fresh = [request for request in line.values() if not request.offloaded]
    turns = zip_longest(offloaded, fresh)
    return [request for pair in turns for request in pair if request is not None]
