"""A node's link to its router: registration, heartbeats, and noticing that the router is gone or another one.

Runs on the node's control thread. The node dials; the router answers every NodeStatus with a StatusAck.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, cast

from protocol.channel import ControlOverloaded, ControlThread, Link
from protocol.logs import event
from protocol.messages import (
    MAX_DELTAS,
    Abort,
    DecodeRequest,
    Message,
    Nack,
    NodeStatus,
    StatusAck,
    TokenDelta,
    TokenDeltas,
    ToNode,
)

MISSED_ACKS = 3
REMIND_EVERY = 5
"""Ticks without any answer between two warnings."""
MAX_UNSENT = 100_000
"""Messages that wait for the control thread."""

log = logging.getLogger(__name__)


class RouterLink:
    """`on_lost` is called when a router that knew us stops answering, or when a new one took its place: whatever the
    old one asked for has nobody waiting for it any more."""

    def __init__(
        self,
        control: ControlThread,
        status: Callable[[], NodeStatus],
        on_request: Callable[[DecodeRequest | Abort], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._control = control
        self._status = status
        self._on_request = on_request
        self._on_lost = on_lost
        self._link: Link | None = None
        self._address = ""
        self._router_instance: str | None = None
        self._missed = 0
        self._refusal: str | None = None
        self._lock = threading.Lock()
        self._unsent: list[Message] = []

    @property
    def registered(self) -> bool:
        """The router answers and uses this node."""
        return self._router_instance is not None and self._refusal is None

    def dial(self, address: str) -> None:
        self._address = address
        self._link = self._control.dial(address, ToNode, self._receive)
        self.announce()

    def announce(self) -> None:
        """Send a NodeStatus now: at every tick, and when something changed that the router should know."""
        assert self._link is not None
        self._control.send_now(self._link, self._status())

    def send(self, message: Message) -> None:
        """From any thread, in order. Tokens that wait for the same turn of the control thread share a frame: with one
        for each, heartbeats would stand in line behind thousands. Raises ControlOverloaded if that thread hangs."""
        with self._lock:
            if len(self._unsent) >= MAX_UNSENT:
                raise ControlOverloaded(f"the control thread has {MAX_UNSENT} messages to send")
            self._unsent.append(message)
            first = len(self._unsent) == 1
        if first:
            self._control.post(self._send_waiting)

    def on_tick(self) -> None:
        self.announce()
        self._missed += 1
        if self._missed > MISSED_ACKS and self._router_instance is not None:
            self._lose("no answer")
        elif self._router_instance is None and self._missed % REMIND_EVERY == 0:
            hint = "not running there, not reachable, or another cluster key"
            event(log, "router does not answer", logging.WARNING, address=self._address, hint=hint)

    def _send_waiting(self) -> None:
        assert self._link is not None
        with self._lock:
            waiting, self._unsent = self._unsent, []
        for message in _packed(waiting):
            self._control.send_now(self._link, message)

    def _receive(self, link: Link, sender: bytes, message: Any) -> None:
        match message:
            case StatusAck():
                self._acknowledged(message)
            case DecodeRequest() | Abort():
                self._on_request(message)
            case Nack():
                event(log, "router refused a frame", logging.WARNING, reason=message.failure.message)

    def _acknowledged(self, ack: StatusAck) -> None:
        self._missed = 0
        if self._router_instance not in (None, ack.router_instance):
            self._lose("a new router answers")
        if self._router_instance is None or self._refusal != ack.refusal:
            event(log, "registered with router", router_instance=ack.router_instance, refusal=ack.refusal)
        self._router_instance, self._refusal = ack.router_instance, ack.refusal

    def _lose(self, reason: str) -> None:
        event(log, "router lost", logging.WARNING, router_instance=self._router_instance, reason=reason)
        self._router_instance = None
        self._on_lost()


def _packed(messages: Iterable[Message]) -> Iterator[Message]:
    """The same in the same order, neighbouring tokens in one message."""
    for are_tokens, run in groupby(messages, key=lambda message: isinstance(message, TokenDelta)):
        if are_tokens:
            deltas = cast(list[TokenDelta], list(run))
            parts = (deltas[at : at + MAX_DELTAS] for at in range(0, len(deltas), MAX_DELTAS))
            yield from (TokenDeltas(deltas=part) if len(part) > 1 else part[0] for part in parts)
        else:
            yield from run
