"""A decode side of `python -m bench stall`: the real receiver, and somebody who always wants the next prompt's KV.

All but the pace runs on the pump's thread. A transfer that fails is forgotten, and the next one is asked for.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.messenger_ends import ReceivingEnd
from bench.peers.orders import obey_orders
from bench.stall_shape import TOKENS, means, tables
from kv_messenger.attempts import Arrival, Fetch
from protocol.curve import ClusterKey, read_cluster_key
from protocol.messages import Failure, PrefillAddress, PrefillTimes
from protocol.ticket import TransferKey

DEADLINE_S = 60.0
STOOD_STILL_NS = 1_000_000_000
"""Whoever is so late was stopped, and does not catch up."""


class Pace:
    """Calls `due` with the time of each transfer, `per_s` of them, from a thread of its own."""

    def __init__(self, per_s: float, due: Callable[[int], None]) -> None:
        self._gap_ns = int(1e9 / per_s)
        self._due = due
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pace")
        self._thread.start()

    def _run(self) -> None:
        at = time.monotonic_ns()
        while not self._over.wait(max(0, at - time.monotonic_ns()) / 1e9):
            self._due(at)
            at += self._gap_ns
            if (now := time.monotonic_ns()) - at > STOOD_STILL_NS:
                at = now

    def close(self) -> None:
        self._over.set()
        self._thread.join()


class Demand:
    """TargetOwner. `places`: transfers at once. `again`: have `ask` called soon. Greedy, it asks
    for the next as soon as a place is free; else for those that are due."""

    def __init__(self, places: int, instance: str, again: Callable[[], None]) -> None:
        self._instance = instance
        self._again = again
        self._fetch: Callable[[TransferKey, int], None] | None = None
        self._greedy = False
        self._free = deque(range(places))
        self._due: deque[int] = deque()
        self._asked = 0
        self._place_of: dict[TransferKey, int] = {}
        self._due_of: dict[TransferKey, int] = {}
        self._arrivals: list[tuple[int, int]] = []
        self._failed = 0

    def begin(self, fetch: Callable[[TransferKey, int], None], greedy: bool) -> None:
        """`fetch`: asks for a transfer to that place. Its failure may come before it returns."""
        self._fetch, self._greedy = fetch, greedy
        self.ask()

    def end(self) -> None:
        """What is under way comes yet."""
        self._fetch = None
        self._due.clear()

    def due(self, at_ns: int) -> None:
        if self._fetch is not None:
            self._due.append(at_ns)
            self.ask()

    def ask(self) -> None:
        """As many as may be."""
        while self._fetch is not None and self._free and (self._greedy or self._due):
            self._asked += 1
            key, place = TransferKey(f"request-{self._asked}", 1, self._instance), self._free.popleft()
            self._place_of[key] = place
            self._due_of[key] = time.monotonic_ns() if self._greedy else self._due.popleft()
            self._fetch(key, place)

    def take(self) -> tuple[list[tuple[int, int]], int]:
        """Since the last time: of each that arrived when it was due (greedy: asked for) and when its last write was
        counted; and how many failed."""
        taken = self._arrivals, self._failed
        self._arrivals, self._failed = [], 0
        return taken

    def kv_arrived(self, arrival: Arrival) -> None:
        self._arrivals.append((self._due_of.pop(arrival.key), arrival.arrived_ns))

    def kv_failed(self, key: TransferKey, failure: Failure) -> None:
        del self._due_of[key]
        self._failed += 1

    def pages_safe(self, key: TransferKey) -> None:
        self._free.append(self._place_of.pop(key))
        self._again()

    def prefill_timed(self, key: TransferKey, times: PrefillTimes) -> None: ...


class Decode:
    def __init__(self, name: str, provider: str, places: int, key: ClusterKey) -> None:
        self._demand = Demand(places, f"bench-{name}", lambda: self._end.pump.submit(self._demand.ask))
        self._end = ReceivingEnd(name, means(provider, places, key), self._demand)
        self._pace: Pace | None = None
        self._end.start()

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """`per_s` 0: greedy."""
        match order["do"]:
            case "begin":
                self._begin(PrefillAddress(*order["peer"]), order["per_s"])
            case "end":
                self._stop()
            case "count":
                return {"arrived": self._end.receiver.counters.arrived}
            case "take":
                return self._take()
        return {}

    def _begin(self, peer: PrefillAddress, per_s: float) -> None:
        """Or go on with another load."""

        def fetch(key: TransferKey, place: int) -> None:
            tokens = [0] * TOKENS
            self._end.receiver.fetch(Fetch(key, "", peer, tokens, tables(place), 0, DEADLINE_S))

        self._rest()
        self._end.pump.call(lambda: self._demand.begin(fetch, greedy=not per_s))
        if per_s:
            self._pace = Pace(per_s, lambda at: self._end.pump.submit(lambda: self._demand.due(at)))

    def _rest(self) -> None:
        if self._pace is not None:
            self._pace.close()
            self._pace = None
        self._end.pump.call(self._demand.end)

    def _stop(self) -> None:
        self._rest()
        assert self._end.receiver.wait_idle(DEADLINE_S), "the transfers do not end"

    def _take(self) -> dict[str, Any]:
        """What there was since the last time."""
        taken: list[tuple[list[tuple[int, int]], int]] = []
        self._end.pump.call(lambda: taken.append(self._demand.take()))
        arrivals, failed = taken[0]
        return {"arrivals": arrivals, "failed": failed}

    def close(self) -> None:
        self._stop()
        self._end.close()


def main() -> None:
    name, provider, places, key = sys.argv[1:]
    obey_orders(lambda: Decode(name, provider, int(places), read_cluster_key(Path(key))))


if __name__ == "__main__":
    main()
