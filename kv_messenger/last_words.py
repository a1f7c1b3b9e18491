"""The prefill side's one terminal message per transfer, kept so that it can be repeated to whoever asks again."""

import logging
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from kv_messenger.sender_transfer import ReportFinished, ReportStopped
from protocol.logs import event as log_event
from protocol.messages import Stopped, TransferFinished
from protocol.ticket import TransferKey

REMEMBERED = 4096

SendToPeer = Callable[[str, msgspec.Struct], None]
"""(decode instance, message); never blocks."""

log = logging.getLogger(__name__)


class LastWords:
    """`instance`: ours."""

    def __init__(self, instance: str, send: SendToPeer) -> None:
        self._instance = instance
        self._send = send
        self._said: OrderedDict[TransferKey, Stopped | TransferFinished] = OrderedDict()

    def repeat(self, key: TransferKey) -> bool:
        """False if this transfer has not ended here, or so long ago that it is forgotten."""
        said = self._said.get(key)
        if said is not None:
            self._send(key.instance, said)
        return said is not None

    def finished(self, key: TransferKey, report: ReportFinished, checksums: bytes | None) -> None:
        posted = report.posted
        self._say(
            TransferFinished(instance=self._instance, key=key, posted=posted, times=report.times, checksums=checksums)
        )
        log_event(log, "transfer finished", request=key.request, attempt=key.attempt, posted=posted)

    def stopped(self, key: TransferKey, report: ReportStopped) -> None:
        posted, completed, failure = report.posted, report.completed, report.failure
        self._say(Stopped(instance=self._instance, key=key, posted=posted, completed=completed, failure=failure))
        reason = failure.message if failure else "aborted"
        log_event(log, "transfer stopped", request=key.request, posted=posted, completed=completed, reason=reason)

    def never_heard_of(self, key: TransferKey) -> None:
        """Nothing was posted for it, and nothing will be: it is remembered, should its request come yet."""
        self._say(Stopped(instance=self._instance, key=key, posted=0, completed=0, failure=None))

    def _say(self, message: Stopped | TransferFinished) -> None:
        self._said[message.key] = message
        if len(self._said) > REMEMBERED:
            self._said.popitem(last=False)
        self._send(message.key.instance, message)
