"""The prefill side of `python -m bench stall`: the real sender, around an engine that computes whatever is asked for at
once. Every prompt has the same blocks: what is moved is read from them all the same."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.messenger_ends import INSTANCE, SendingEnd
from bench.messenger_shape import PEER_NAME
from bench.native import advance
from bench.peers.orders import obey_orders
from bench.stall_shape import LAYOUT, TOKENS, means, tables
from kv_messenger.sender_transfer import Chunk
from protocol.curve import ClusterKey, read_cluster_key
from protocol.messages import Failure

TOGETHER = 8
"""Prompts of one forward, at most."""


class Submitted:
    """EnginePort. What waits for the next forward."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._waiting: list[str] = []
        self._stopping = False

    def submit(self, request_id: str, tokens: Sequence[int], refused: Callable[[Failure], None]) -> None:
        with self._change:
            self._waiting.append(request_id)
            self._change.notify()

    def abort(self, request_id: str) -> None:
        with self._change:
            self._waiting = [name for name in self._waiting if name != request_id]

    def release(self, request_id: str) -> None: ...

    def take(self) -> list[str]:
        """Waits for some; none once it was stopped."""
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._stopping)
            taken, self._waiting = self._waiting[:TOGETHER], self._waiting[TOGETHER:]
        return [] if self._stopping else taken

    def stop(self) -> None:
        with self._change:
            self._stopping = True
            self._change.notify()


class Prefill:
    def __init__(self, provider: str, key: ClusterKey) -> None:
        self._submitted = Submitted()
        self._end = SendingEnd(means(provider, 1, key), self._submitted)
        self._thread = threading.Thread(target=self._compute, name="engine")
        self._thread.start()

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        sender = self._end.sender
        if order["do"] == "introduce":
            return {"instance": INSTANCE, "name": PEER_NAME, "address": self._end.address}
        assert order["do"] == "count", order
        return {
            "lost": sender.counters.peers_lost,
            "sessions": sender.sessions,
            "transfers": sender.transfers,
            "outstanding": self._end.pump.count().outstanding,
        }

    def _compute(self) -> None:
        while names := self._submitted.take():
            first = self._end.word.value + 1
            announced = [(name, Chunk(0, TOKENS, tables(0), first)) for name in names]
            self._end.pump.call(lambda announced=announced: self._end.sender.on_chunks(announced))  # type: ignore[misc]
            began = time.monotonic_ns()
            advance(self._end.word.address, LAYOUT.layers, 0)
            self._ended(names, began, time.monotonic_ns())

    def _ended(self, names: list[str], began_ns: int, ended_ns: int) -> None:
        self._end.pump.submit(lambda: self._end.sender.on_forward_ended(names, began_ns, ended_ns))

    def close(self) -> None:
        self._submitted.stop()
        self._thread.join()
        self._end.close()


def main() -> None:
    provider, key = sys.argv[1:]
    obey_orders(lambda: Prefill(provider, read_cluster_key(Path(key))))


if __name__ == "__main__":
    main()
