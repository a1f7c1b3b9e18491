"""What the prefill side has accepted and not yet released: one transfer per ticket, found by its key, its request in
the engine, or a batch of its writes."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kv_messenger.sender_transfer import SenderTransfer
from kv_messenger.sources import Source
from protocol.ticket import TransferKey


def engine_id(key: TransferKey) -> str:
    """The name of a transfer's prompt in the prefill engine."""
    return f"{key.request}#{key.attempt}@{key.instance}"


@dataclass(frozen=True, slots=True)
class _Batch:
    """Whose it is, and on which endpoint."""

    key: TransferKey
    endpoint: int


@dataclass(frozen=True, slots=True)
class Sent:
    """A transfer, and the engine that computes it. `checksums`: the decode node wants them of what it gets."""

    transfer: SenderTransfer
    source: Source
    checksums: bool = False


class SentTable:
    """For the pump's thread, but for `wait_none`."""

    def __init__(self) -> None:
        self._by_key: dict[TransferKey, Sent] = {}
        self._by_request: dict[str, TransferKey] = {}
        self._batches: dict[int, _Batch] = {}
        self._none = threading.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: TransferKey) -> bool:
        return key in self._by_key

    def add(self, sent: Sent) -> None:
        key = sent.transfer.key
        self._by_key[key] = sent
        self._by_request[engine_id(key)] = key
        self._none.clear()

    def remove(self, key: TransferKey) -> None:
        """No write of it is outstanding."""
        del self._by_key[key]
        del self._by_request[engine_id(key)]
        if not self._by_key:
            self._none.set()

    def get(self, key: TransferKey) -> Sent | None:
        return self._by_key.get(key)

    def of_request(self, request_id: str) -> Sent | None:
        key = self._by_request.get(request_id)
        return self._by_key[key] if key is not None else None

    def to_instance(self, instance: str) -> list[Sent]:
        return [sent for key, sent in self._by_key.items() if key.instance == instance]

    def expired(self, now: float) -> list[Sent]:
        return [s for s in self._by_key.values() if s.transfer.live and now >= s.transfer.deadline]

    def least_busy(self, sources: Sequence[Source]) -> Source:
        """The one with the fewest transfers."""
        return min(sources, key=lambda source: sum(sent.source is source for sent in self._by_key.values()))

    def wait_none(self, timeout: float) -> bool:
        return self._none.wait(timeout)

    # ---- batches ----

    def posted(self, handle: int, key: TransferKey, endpoint: int) -> None:
        self._batches[handle] = _Batch(key, endpoint)

    def endpoint_of(self, handle: int) -> int:
        return self._batches[handle].endpoint

    def ended(self, handle: int) -> Sent | None:
        """Forgets the batch. None if its transfer is gone."""
        return self._by_key.get(self._batches.pop(handle).key)
