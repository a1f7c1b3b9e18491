"""What the decode side has asked for: one attempt per ticket, found by its key, its expectation or its landing."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from fabric.api import Landing
from kv_messenger.receiver_transfer import ReceiverTransfer
from protocol.messages import PrefillAddress
from protocol.ticket import TransferKey


@dataclass(frozen=True, slots=True)
class Fetch:
    """What the node asks for: the KV of `tokens` (the prompt without its last one), from page `first_page` on, into the
    blocks of `tables` (by group) of the node's engine `target`, by `peer`, within `deadline_s`. `context_slot`: of that
    engine, where its layout has a context."""

    key: TransferKey
    public_id: str
    peer: PrefillAddress
    tokens: Sequence[int]
    tables: Sequence[Sequence[int]]
    first_page: int
    deadline_s: float
    target: int = 0
    context_slot: int | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """`arrived_ns`: monotonic, when the last write was counted. `provider`: by way of what, in the fabric's words."""

    key: TransferKey
    writes: int
    bytes: int
    arrived_ns: int
    provider: str


@dataclass
class ReceiverCounters:
    requested: int = 0
    arrived: int = 0
    failed: int = 0
    cancelled: int = 0
    fences: int = 0
    peers_lost: int = 0
    unknown_completions: int = 0
    checksum_errors: int = 0
    writes: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Attempt:
    """One fetch, with what the fabric holds for it. Until its peer's layout is known nothing is expected, and nothing
    was asked for: `expectation` is None."""

    fetch: Fetch
    transfer: ReceiverTransfer
    landing: Landing
    immediate: int
    expectation: int | None = None
    bytes: int = 0
    """What will have arrived with the last write."""
    arrived_ns: int = 0
    provider: str = ""

    @property
    def over(self) -> bool:
        return self.transfer.closed and self.transfer.decided is not None


class Attempts:
    """Those that are not over. For the pump's thread, but for `wait_none`."""

    def __init__(self) -> None:
        self._by_key: dict[TransferKey, Attempt] = {}
        self._by_expectation: dict[int, Attempt] = {}
        self._none = threading.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, attempt: Attempt) -> None:
        self._by_key[attempt.fetch.key] = attempt
        self._none.clear()

    def expecting(self, attempt: Attempt, expectation: int) -> None:
        attempt.expectation = expectation
        self._by_expectation[expectation] = attempt

    def remove(self, attempt: Attempt) -> None:
        """May be called again."""
        self._by_key.pop(attempt.fetch.key, None)
        if attempt.expectation is not None:
            self._by_expectation.pop(attempt.expectation, None)
        if not self._by_key:
            self._none.set()

    def all(self) -> list[Attempt]:
        return list(self._by_key.values())

    def get(self, key: TransferKey) -> Attempt | None:
        return self._by_key.get(key)

    def of_expectation(self, handle: int) -> Attempt | None:
        return self._by_expectation.get(handle)

    def of_landing(self, landing: Landing) -> list[Attempt]:
        return [attempt for attempt in self._by_key.values() if attempt.landing.id == landing.id]

    def asked_of(self, instance: str, key: TransferKey) -> Attempt | None:
        """The attempt, if this instance is the one that was asked for it."""
        attempt = self._by_key.get(key)
        return attempt if attempt is not None and attempt.fetch.peer.instance == instance else None

    def wait_none(self, timeout: float) -> bool:
        return self._none.wait(timeout)
