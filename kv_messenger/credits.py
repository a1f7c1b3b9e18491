"""How much of a prefill engine's memory the prompts of one decode node may take.

A prompt's pages are out of use from when its engine takes it until all its writes have completed, and those may take as
long as the decode node pleases: one that reads slowly, or stands still until it is given up, must leave room for the
others. While several are connected, each may have as much as it leaves free (dynamic thresholds; Choudhury and Hahne,
1998): one by itself half of the memory, n that want more 1/(n + 1) each. Whoever has nothing may have one prompt of any
size, so all go on. Prompts without credit wait here, each decode node's in their order, where they are in nobody's way.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kv_messenger.sent import Sent
from kv_messenger.sources import Source
from protocol.layout import KVLayout
from protocol.ticket import TransferKey

MAX_WAITING = 256
"""Prompts of one decode node that may wait for credit."""


class Prompt(NamedTuple):
    """Of a transfer, on its way to the engine."""

    sent: Sent
    tokens: Sequence[int]


class _Pinned(NamedTuple):
    source: Source
    cost: int


@dataclass(slots=True)
class Credits:
    """For the pump's thread; `waiting` is for any. `layout`: of the sources' pools."""

    layout: KVLayout
    _waiting: dict[TransferKey, Prompt] = field(default_factory=dict)
    _pinned: dict[TransferKey, _Pinned] = field(default_factory=dict)
    _taken: dict[Source, Counter[str]] = field(default_factory=dict)
    """By decode instance, in bytes of the engine's pool."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def may_wait(self, instance: str) -> bool:
        return sum(key.instance == instance for key in self._waiting) < MAX_WAITING

    def ask(self, prompt: Prompt) -> None:
        """It waits, behind all others."""
        self._waiting[prompt.sent.transfer.key] = prompt

    def grant(self, alone: bool) -> list[Prompt]:
        """Those that need not wait any longer; each is to be given back. `alone`: there is one decode node."""
        granted, behind = [], set[tuple[Source, str]]()
        for key, prompt in list(self._waiting.items()):
            line = prompt.sent.source, key.instance
            if line in behind or not (alone or self._may_take(prompt.sent)):
                behind.add(line)
                continue
            del self._waiting[key]
            self._take(prompt.sent)
            granted.append(prompt)
        return granted

    def granted(self, key: TransferKey) -> bool:
        """Its engine knows of it."""
        return key in self._pinned

    def withdraw(self, key: TransferKey) -> None:
        """It does not wait any longer, if it did."""
        self._waiting.pop(key, None)

    def give_back(self, key: TransferKey) -> None:
        """What was granted to it."""
        source, cost = self._pinned.pop(key)
        taken = self._taken[source]
        taken[key.instance] -= cost
        if not taken[key.instance]:
            del taken[key.instance]

    def _may_take(self, sent: Sent) -> bool:
        taken, cost = self._taken.get(sent.source, Counter[str]()), self._cost(sent)
        mine, free = taken[sent.transfer.key.instance], sent.source.pool_bytes - taken.total()
        return not mine or mine + cost <= free - cost

    def _take(self, sent: Sent) -> None:
        key, cost = sent.transfer.key, self._cost(sent)
        self._pinned[key] = _Pinned(sent.source, cost)
        self._taken.setdefault(sent.source, Counter())[key.instance] += cost

    def _cost(self, sent: Sent) -> int:
        """Of its pages, or of its context slot, whichever are the scarcer."""
        layout, tokens, source = self.layout, sent.transfer.plan.tokens, sent.source
        groups = range(len(layout.groups))
        pages = sum(layout.pages_for(group, tokens) * layout.block_bytes(group) for group in groups)
        if source.context is None:
            return pages
        return max(pages, source.pool_bytes * layout.context.slot_bytes // source.context.length)
