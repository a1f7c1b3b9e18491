"""A prefill node that says everything about the end of a transfer more than once, and of transfers that never were."""

from collections.abc import Iterator

import msgspec

from prefill_node.server import DecodePeers
from protocol.messages import Stopped, TransferFinished
from protocol.ticket import TransferKey


class RepeatingPeers(DecodePeers):
    """Each last word twice; then, as if stopped, for that transfer once more and for an unknown one."""

    def send(self, instance: str, message: msgspec.Struct) -> None:
        super().send(instance, message)
        if isinstance(message, TransferFinished | Stopped):
            for more in _more(instance, message):
                super().send(instance, more)


def _more(instance: str, said: TransferFinished | Stopped) -> Iterator[msgspec.Struct]:
    unknown = TransferKey("never-asked-for", 1, instance)
    yield said
    yield Stopped(instance=said.instance, key=said.key, posted=said.posted, completed=said.posted, failure=None)
    yield Stopped(instance=said.instance, key=unknown, posted=3, completed=3, failure=None)
    if isinstance(said, TransferFinished):
        yield msgspec.structs.replace(said, key=unknown)
