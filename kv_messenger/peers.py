"""The decode side's view of prefill nodes: one landing endpoint per instance, greeted once, then watched.

    greeted --Welcome--> welcomed --silent, broken--> lost: fenced at once, or (where the provider allows a fence only
                                                      for a dead peer) its landing lingers until that is proven

Every greeting opens a fresh landing with a higher number; a fenced landing never comes back.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from fabric.api import Landing, TransferEngine
from protocol.layout import KVLayout
from protocol.messages import Hello, Ping, PrefillAddress, RailFenced
from protocol.ticket import TransferKey

PING_EVERY_S = 1.0
PEER_TIMEOUT_S = 4.0
"""Of either side, before it gives the other up: three missed pings, and some slack."""
RAILS_AGAIN_S = 60.0
"""After the last rail was lost, when peers meet on a fresh landing, as soon as nothing is under way. No less than
AVOID_S of the prefill side: a session that is opened before that does without the rail for good."""

SendToPeer = Callable[[PrefillAddress, msgspec.Struct], None]
"""Dials if need be; never blocks."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """What we tell every prefill node about ourselves."""

    instance: str
    name: str
    compatibility: str
    layout: KVLayout


@dataclass(slots=True)
class Peer:
    """`number`: of its landing. `layout`: of its pools, once it has welcomed us; until then `waiting` holds what we
    will ask of it. `fenced`: by its rails that it has lost, what we answered; `rail_lost_at`: when the last of them
    was."""

    address: PrefillAddress
    number: int
    landing: Landing
    last_seen: float
    layout: KVLayout | None = None
    waiting: list[TransferKey] = field(default_factory=list)
    fenced: dict[int, RailFenced] = field(default_factory=dict)
    rail_lost_at: float | None = None

    def withdraw(self, key: TransferKey) -> bool:
        """Take back what was never asked. False if it was, or is unknown."""
        before = len(self.waiting)
        self.waiting = [waiting for waiting in self.waiting if waiting != key]
        return len(self.waiting) < before


class PrefillPeers:
    """Used on the pump's thread alone. It never closes a landing: that is a fence, and the receiver's to decide."""

    def __init__(
        self,
        me: Introduction,
        fabric: TransferEngine,
        send: SendToPeer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._me = me
        self._fabric = fabric
        self._send = send
        self._clock = clock
        self._peers: dict[str, Peer] = {}
        self._lingering: list[tuple[PrefillAddress, Landing]] = []
        self._greetings = 0
        self._next_ping = 0.0

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def instance(self) -> str:
        """Ours."""
        return self._me.instance

    @property
    def lingering(self) -> list[tuple[str, Landing]]:
        """Landings of lost peers that may not be closed yet, and whose they are."""
        return [(owner.instance, landing) for owner, landing in self._lingering]

    def knows(self, instance: str) -> bool:
        """Whether anything of this instance is still open: then its control link is needed."""
        return instance in self._peers or any(owner.instance == instance for owner, _ in self._lingering)

    def get(self, instance: str) -> Peer | None:
        return self._peers.get(instance)

    def of_landing(self, landing: int) -> Peer | None:
        return next((peer for peer in self._peers.values() if peer.landing.id == landing), None)

    def reach(self, address: PrefillAddress) -> Peer:
        return self._peers.get(address.instance) or self.greet(address)

    def greet(self, address: PrefillAddress) -> Peer:
        """A fresh landing for this instance alone, and Hello."""
        self._greetings += 1
        landing = self._fabric.open_landing(address.name)
        peer = Peer(address, self._greetings, landing, self._clock())
        self._peers[address.instance] = peer
        hello = Hello(
            instance=self._me.instance,
            name=self._me.name,
            expects=address.instance,
            compatibility=self._me.compatibility,
            layout=self._me.layout,
            landing=peer.number,
            landing_address=landing.address,
        )
        self._send(address, hello)
        return peer

    def greeted(self, instance: str, number: int) -> Peer | None:
        """The peer whose current greeting this answers, for the first time."""
        peer = self._peers.get(instance)
        return peer if peer is not None and peer.number == number and peer.layout is None else None

    def seen(self, instance: str) -> None:
        peer = self._peers.get(instance)
        if peer is not None:
            peer.last_seen = self._clock()

    def ping(self, now: float) -> None:
        """Lost ones too, while their landings linger: an answer of another instance proves them dead."""
        if now >= self._next_ping:
            self._next_ping = now + PING_EVERY_S
            watched = [*(peer.address for peer in self._peers.values()), *(owner for owner, _ in self._lingering)]
            for address in {address.instance: address for address in watched}.values():
                self._send(address, Ping(instance=self._me.instance))

    def silent(self, now: float) -> list[Peer]:
        return [peer for peer in self._peers.values() if now - peer.last_seen > PEER_TIMEOUT_S]

    def lame(self, now: float) -> list[Peer]:
        """Those whose landing lacks rails, all of them for so long that a fresh one is worth a try."""
        return [p for p in self._peers.values() if p.rail_lost_at is not None and now - p.rail_lost_at > RAILS_AGAIN_S]

    def forget(self, peer: Peer) -> None:
        del self._peers[peer.address.instance]

    def linger(self, peer: Peer) -> None:
        """Forget the peer, keep its landing until `forget_lingering`."""
        self.forget(peer)
        self._lingering.append((peer.address, peer.landing))

    def forget_lingering(self, landing: Landing) -> None:
        self._lingering = [item for item in self._lingering if item[1] is not landing]
