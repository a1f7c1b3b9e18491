"""The decode node's control plane: the link to the router, and one link to each address of prefill nodes.

Runs on the control thread. It turns frames into calls on the node's two threads and knows nothing of their state,
except when it last heard from a peer: one that is silent, or whose connection is broken, and whose address refuses
connections is proven dead.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq

from kv_messenger.pump import Pump
from kv_messenger.receiver import Receiver
from protocol.channel import ControlThread, Link
from protocol.logs import event
from protocol.messages import (
    HelloRefused,
    Nack,
    Pong,
    PrefillAccepted,
    PrefillAddress,
    PrefillRefused,
    RailLost,
    Stopped,
    ToDecode,
    TransferFinished,
    Welcome,
)

SILENT_AFTER_S = 1.5
PROBE_TIMEOUT_S = 0.5

log = logging.getLogger(__name__)


Prober = Callable[[str, Callable[[bool], None]], None]
"""(address, then): find out whether nobody listens there, and call `then` with it, on any thread. Never blocks."""


def probe_in_thread(address: str, then: Callable[[bool], None]) -> None:
    """A connection attempt may take PROBE_TIMEOUT_S."""
    threading.Thread(target=lambda: then(_refuses(address)), name="probe", daemon=True).start()


def _refuses(address: str) -> bool:
    try:
        where = urlsplit(address)
        socket.create_connection((where.hostname or "", where.port or 0), PROBE_TIMEOUT_S).close()
    except (ConnectionRefusedError, ValueError):  # the latter: where there can be no socket, as at port 99999
        return True
    except OSError as error:
        event(log, "prefill node unreachable", logging.WARNING, address=address, error=str(error))
    return False


@dataclass(slots=True)
class _Line:
    """The connection to an address, for all instances that were sent to there, dead ones and the one that lives: with
    one for each they would take each other's place, being of one identity, and what is on its way would be lost.
    `heard`: who has answered."""

    link: Link
    heard: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Peer:
    """`before`: who was heard at its address before it was sent to: a late word of theirs proves nothing."""

    address: PrefillAddress
    before: frozenset[str]
    last_heard: float
    probing: bool = False


class PrefillLinks:
    """The links to prefill nodes. `send` and `hang_up` come from the pump's thread."""

    def __init__(
        self, control: ControlThread, clock: Callable[[], float] = time.monotonic, probe: Prober = probe_in_thread
    ) -> None:
        self._control = control
        self._clock = clock
        self._probe = probe
        self._peers: dict[str, _Peer] = {}
        self._lines: dict[str, _Line] = {}
        self._pump: Pump | None = None
        self._receiver: Receiver | None = None

    def deliver_to(self, pump: Pump, receiver: Receiver) -> None:
        self._pump, self._receiver = pump, receiver

    @property
    def count(self) -> int:
        return len(self._peers)

    def send(self, address: PrefillAddress, message: msgspec.Struct) -> None:
        self._control.post(lambda: self._send_now(address, message))

    def hang_up(self, instance: str) -> None:
        self._control.post(lambda: self._hang_up_now(instance))

    def on_tick(self) -> None:
        """Ask the operating system about peers that were not heard of."""
        now = self._clock()
        for peer in self._peers.values():
            if now - peer.last_heard > SILENT_AFTER_S:
                self._find_out(peer)

    def _send_now(self, address: PrefillAddress, message: msgspec.Struct) -> None:
        line = self._lines.get(address.address) or self._dial(address)
        if line is None:
            return
        if address.instance not in self._peers:
            self._peers[address.instance] = _Peer(address, frozenset(line.heard), self._clock())
        self._control.send_now(line.link, message)

    def _dial(self, address: PrefillAddress) -> _Line | None:
        """None where that is no address: nobody can listen there."""
        where = address.address
        try:
            link = self._control.dial(
                where, ToDecode, lambda _, __, got: self._receive(where, got), lambda: self._broken(where)
            )
        except zmq.ZMQError as error:
            self._proven_dead(address.instance, str(error))
            return None
        line = self._lines[where] = _Line(link)
        return line

    def _broken(self, address: str) -> None:
        """Whoever was there may have ended."""
        for peer in self._at(address):
            self._find_out(peer)

    def _hang_up_now(self, instance: str) -> None:
        peer = self._peers.pop(instance, None)
        if peer is not None and not self._at(peer.address.address):
            self._control.hang_up(self._lines.pop(peer.address.address).link)

    def _at(self, address: str) -> list[_Peer]:
        return [peer for peer in self._peers.values() if peer.address.address == address]

    def _receive(self, address: str, message: Any) -> None:
        assert self._pump is not None
        there = self._at(address)
        for peer in there:
            peer.last_heard = self._clock()
        if isinstance(message, Nack):
            event(log, "prefill node refused a frame", logging.WARNING, reason=message.failure.message)
            return
        self._lines[address].heard.add(message.instance)
        for peer in there:
            if message.instance not in (peer.address.instance, *peer.before):
                self._proven_dead(peer.address.instance, "another instance answers at its address")
        for action in self._actions([peer.address.instance for peer in there], message):
            self._pump.submit(action)

    def _actions(self, there: list[str], message: Any) -> list[Callable[[], None]]:
        """`there`: instances that were sent to at the address that it comes from."""
        assert self._receiver is not None
        receiver = self._receiver
        if isinstance(message, HelloRefused):
            return [partial(receiver.on_hello_refused, instance, message) for instance in there]
        if message.instance not in there:
            return []
        match message:
            case Welcome():
                return [lambda: receiver.on_welcome(message)]
            case Pong() | PrefillAccepted():
                return [lambda: receiver.on_seen(message.instance)]
            case PrefillRefused():
                return [lambda: receiver.on_refused(message)]
            case TransferFinished():
                return [lambda: receiver.on_finished(message)]
            case Stopped():
                return [lambda: receiver.on_stopped(message)]
            case RailLost():
                return [lambda: receiver.on_rail_lost(message)]
        return []

    def _find_out(self, peer: _Peer) -> None:
        if not peer.probing:
            peer.probing = True
            self._probe(peer.address.address, partial(self._probed, peer))

    def _probed(self, peer: _Peer, refuses: bool) -> None:
        """On the probe's thread."""
        if refuses:
            self._proven_dead(peer.address.instance, "its address refuses connections")
        peer.probing = False

    def _proven_dead(self, instance: str, reason: str) -> None:
        assert self._pump is not None and self._receiver is not None
        receiver = self._receiver
        event(log, "prefill node dead", logging.WARNING, peer_instance=instance, reason=reason)
        self._pump.submit(lambda: receiver.peer_dead(instance))
        self.hang_up(instance)
