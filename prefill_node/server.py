"""The prefill node's control plane: the socket that decode nodes dial.

Runs on the control thread. A decode node is known by its socket identity, which is its instance id; a message that
claims another instance is dropped.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from kv_messenger.pump import Pump
from kv_messenger.sender import Sender
from protocol.channel import ControlThread, Link
from protocol.logs import event
from protocol.messages import AbortTransfer, FromDecode, Hello, Nack, Ping, PrefillRequest, RailFenced

log = logging.getLogger(__name__)

_Asked = Hello | Ping | PrefillRequest | AbortTransfer | RailFenced


@dataclass
class DecodePeerCounters:
    """`foreign_messages`: of a peer that claimed another instance than its socket's."""

    foreign_messages: int = 0


class DecodePeers:
    """Replies go out through `send`, from any thread."""

    def __init__(self, control: ControlThread) -> None:
        self._control = control
        self._link: Link | None = None
        self._pump: Pump | None = None
        self._sender: Sender | None = None
        self.counters = DecodePeerCounters()

    def deliver_to(self, pump: Pump, sender: Sender) -> None:
        self._pump, self._sender = pump, sender

    def bind(self, address: str) -> str:
        """Returns the address that was bound. Raises zmq.ZMQError."""
        self._link, bound = self._control.bind(address, FromDecode, self._receive)
        return bound

    def send(self, instance: str, message: msgspec.Struct) -> None:
        assert self._link is not None
        self._control.send(self._link, message, instance.encode())

    def _receive(self, link: Link, sender: bytes, message: Any) -> None:
        assert self._pump is not None
        if isinstance(message, Nack):
            event(log, "decode node refused a frame", logging.WARNING, reason=message.failure.message)
            return
        if self._claimed(message).encode() != sender:
            self.counters.foreign_messages += 1
            event(log, "message of a foreign instance", logging.WARNING, kind=type(message).__name__)
            return
        self._pump.submit(self._action(message))

    def _claimed(self, message: _Asked) -> str:
        match message:
            case Hello() | Ping() | RailFenced():
                return message.instance
            case PrefillRequest():
                return message.ticket.key.instance
            case AbortTransfer():
                return message.key.instance

    def _action(self, message: _Asked) -> Callable[[], None]:
        assert self._sender is not None
        sender = self._sender
        match message:
            case Hello():
                return lambda: sender.on_hello(message)
            case Ping():
                return lambda: sender.on_ping(message)
            case PrefillRequest():
                return lambda: sender.on_prefill_request(message)
            case AbortTransfer():
                return lambda: sender.on_abort(message)
            case RailFenced():
                return lambda: sender.on_rail_fenced(message)
