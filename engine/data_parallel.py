"""Several engines of one model in one node, each with requests of its own: what they are and hold together."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from engine.counters import EngineCounters
from engine.engine import Engine
from engine.prefix_cache import PrefixCounters
from protocol.counts import added
from protocol.layout import KVLayout


class DataParallelEngines:
    """At least one. To be read from any thread, as an engine's own numbers are."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        assert engines, "a node without an engine"
        self._engines = tuple(engines)

    @property
    def layout(self) -> KVLayout:
        """Of each."""
        return self._engines[0].layout

    @property
    def max_context(self) -> int:
        return min(engine.max_context for engine in self._engines)

    @property
    def pages_total(self) -> int:
        return sum(engine.pages_total for engine in self._engines)

    @property
    def pages_free(self) -> int:
        return sum(engine.pages_free for engine in self._engines)

    @property
    def pages_cached(self) -> int:
        return sum(engine.pages_cached for engine in self._engines)

    @property
    def pages_quarantined(self) -> int:
        return sum(engine.pages_quarantined for engine in self._engines)

    @property
    def context_slots_free(self) -> int:
        return sum(engine.context_slots_free for engine in self._engines)

    @property
    def running(self) -> int:
        return sum(engine.running for engine in self._engines)

    @property
    def waiting(self) -> int:
        return sum(engine.waiting for engine in self._engines)

    @property
    def counters(self) -> EngineCounters:
        return added([engine.counters for engine in self._engines])

    @property
    def prefix_counters(self) -> PrefixCounters:
        return added([engine.prefix_counters for engine in self._engines])

    def ledger(self) -> list[dict[str, Any]]:
        """As `Engine.ledger`, with the number of the engine: blocks are numbered anew in each."""
        numbered = enumerate(self._engines)
        return [{"engine": number, **record} for number, engine in numbered for record in engine.ledger()]

    def close(self) -> None:
        """All of them, also where one raises."""
        with ExitStack() as closing:
            for engine in self._engines:
                closing.callback(engine.close)
