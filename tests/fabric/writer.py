"""A child process that writes at full speed to a landing, for the tests that fence or kill it.

Told by one JSON line on stdin (provider, node, landing, key, base, length, page, immediate). Prints "writing" once its
first batch completed, and "ended" with the outcome of the batch that failed. Every pass over the target has other
bytes, so that a late write shows.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from fabric.api import PageWrites, Sending, WritesEnded
from fabric.libfabric import LibfabricEngine, open_engine
from tests.fabric.child import told_region
from tests.fabric.shared_memory import register_shared


def batches(engine: LibfabricEngine, order: dict[str, Any]) -> Iterator[PageWrites]:
    """Two alternating sources, so that one can be refilled while the other is on its way."""
    target = told_region(order)
    (source, region), (other, other_region) = (register_shared(engine, order["length"]) for _ in range(2))
    sources, regions = (source, other), (region, other_region)
    every = list(range(order["length"] // order["page"]))
    page, turn = order["page"], 0
    while True:
        sources[turn % 2][:] = turn % 251 + 1
        yield PageWrites(regions[turn % 2], every, page, 0, target, every, page, 0, page, order["immediate"])
        turn += 1


def write_until_it_fails(engine: LibfabricEngine, sending: Sending, order: dict[str, Any]) -> WritesEnded:
    """Always two batches under way."""
    work = batches(engine, order)
    engine.write(sending, next(work))
    engine.write(sending, next(work))
    completed = 0
    while True:
        for event in engine.progress(1.0):
            if isinstance(event, WritesEnded):
                if event.error:
                    return event
                if not completed:
                    report("writing")
                completed += event.completed
                engine.write(sending, next(work))


def report(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def main() -> None:
    order = json.loads(sys.stdin.readline())
    with_engine = open_engine(order["provider"], order["node"])
    sending = with_engine.connect("landing", bytes.fromhex(order["landing"]))
    event = write_until_it_fails(with_engine, sending, order)
    report(f"ended {event.error}")
    with_engine.close()


if __name__ == "__main__":
    main()
