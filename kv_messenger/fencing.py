"""Giving up on prefill nodes: when a landing is closed, what happens to its transfers, and who is greeted again.

Closing a landing is the fence; where the provider allows that only for a dead peer, a lost peer's landing lingers, and
its pages stay quarantined, until the peer is proven dead or has accounted for them.
"""

import logging
from collections.abc import Callable, Sequence

from fabric.api import Landing, TransferEngine
from fabric.errors import FabricError, FabricUsageError
from kv_messenger.attempts import Attempt, Attempts, ReceiverCounters
from kv_messenger.peers import Peer, PrefillPeers
from kv_messenger.receiver_transfer import Action
from protocol.logs import event as log_event
from protocol.messages import Failure, FailureCode, RailFenced, RailLost

log = logging.getLogger(__name__)


class Fencing:
    """`hang_up` closes the control link to an instance, `do` carries out an attempt's actions. On the pump's thread."""

    def __init__(
        self,
        fabric: TransferEngine,
        peers: PrefillPeers,
        attempts: Attempts,
        counters: ReceiverCounters,
        hang_up: Callable[[str], None],
        do: Callable[[Attempt, Sequence[Action]], None],
    ) -> None:
        self._fabric = fabric
        self._peers = peers
        self._attempts = attempts
        self._counters = counters
        self._hang_up = hang_up
        self._do = do

    def lose(self, peer: Peer, reason: str, proven_dead: bool = False) -> None:
        """Every transfer from it fails now, and its landing is closed as soon as that is allowed."""
        instance, name = peer.address.instance, peer.address.name
        self._counters.peers_lost += 1
        log_event(log, "prefill node lost", logging.WARNING, peer=name, peer_instance=instance, reason=reason)
        failure = Failure(FailureCode.NODE_LOST, f"prefill node {name} lost: {reason}"[:1000])
        for attempt in self._attempts.of_landing(peer.landing):
            self._do(attempt, attempt.transfer.on_peer_lost(failure))
            if peer.withdraw(attempt.fetch.key):
                self._do(attempt, attempt.transfer.on_never_sent())
        if proven_dead or not self._fabric.fence_needs_dead_peer(peer.landing):
            self._drop(peer, failure)
        else:
            self._linger(peer)

    def peer_dead(self, instance: str) -> None:
        """Its process is proven gone."""
        peer = self._peers.get(instance)
        if peer is not None:
            self.lose(peer, "its process is gone", proven_dead=True)
        for owner, landing in self._peers.lingering:
            if owner == instance:
                self._peers.forget_lingering(landing)
                self._fence(landing, Failure(FailureCode.NODE_LOST, "prefill node is gone"))

    def refused(self, peer: Peer, failure: Failure) -> None:
        """It has never written to us, and will not."""
        log_event(log, "no session", logging.WARNING, peer=peer.address.name, reason=failure.message)
        self._drop(peer, failure)

    def settle(self, attempt: Attempt, reason: str) -> None:
        """A transfer can be settled only by fencing a peer that still answers: all its transfers go down with it."""
        peer = self._peers.of_landing(attempt.landing.id)
        if peer is not None and not self._fabric.fence_needs_dead_peer(peer.landing):
            log_event(log, "fencing", logging.WARNING, peer=peer.address.name, reason=reason)
            self._renew(peer)

    def renew_if_stale(self, attempt: Attempt, failure: Failure | None) -> None:
        """The peer has no session for this landing (any more): it needs a fresh one, unless it got one already."""
        peer = self._peers.of_landing(attempt.landing.id)
        if peer is not None and failure is not None and failure.code is FailureCode.STALE_PEER:
            self._renew(peer)

    def fence_rails(self, peer: Peer, lost: RailLost, now: float) -> RailFenced | None:
        """The answer to a peer that has lost a rail, the same however often it asks. None, if it asks for what cannot
        be: it will find that nobody answers."""
        if lost.rail not in peer.fenced:
            completed = {doubt.immediate: doubt.completed for doubt in lost.doubts}
            name, remotes = peer.address.name, sorted(lost.remotes)
            try:
                again = self._fabric.fence_rails(peer.landing, remotes, completed)
            except FabricUsageError as error:
                log_event(log, "rail not fenced", logging.WARNING, peer=name, rails=remotes, reason=str(error))
                return None
            log_event(log, "rail fenced", logging.WARNING, peer=name, rails=remotes, transfers_to_repeat=len(again))
            peer.fenced[lost.rail] = RailFenced(
                instance=self._peers.instance, landing=peer.number, rail=lost.rail, again=again
            )
            peer.rail_lost_at = now
        return peer.fenced[lost.rail]

    def renew_lame(self, now: float) -> None:
        """Peers whose rails may be well again, while nothing is under way from them."""
        for peer in self._peers.lame(now):
            if not self._attempts.of_landing(peer.landing):
                log_event(log, "all rails again", peer=peer.address.name)
                self._renew(peer)

    def close_accounted(self) -> None:
        """Of lingering landings whose writes are all accounted for, so that nothing arrives and closing is safe."""
        for instance, landing in self._peers.lingering:
            if self._attempts.of_landing(landing):
                continue
            self._peers.forget_lingering(landing)
            self._fabric.close_endpoint(landing)
            if not self._peers.knows(instance):
                self._hang_up(instance)

    def _linger(self, peer: Peer) -> None:
        transfers = len(self._attempts.of_landing(peer.landing))
        why = f"{self._fabric.provider_of(peer.landing)} closes it only once the process is gone"
        log_event(
            log,
            "landing kept, with the pages of its transfers",
            logging.WARNING,
            peer=peer.address.name,
            peer_instance=peer.address.instance,
            transfers=transfers,
            reason=why,
        )
        self._peers.linger(peer)

    def _drop(self, peer: Peer, failure: Failure) -> None:
        self._peers.forget(peer)
        self._hang_up(peer.address.instance)
        self._fence(peer.landing, failure)

    def _renew(self, peer: Peer) -> None:
        """Fence a live peer and greet it again on a fresh landing."""
        if self._fabric.fence_needs_dead_peer(peer.landing) and self._attempts.of_landing(peer.landing):
            self._linger(peer)
        else:
            self._peers.forget(peer)
            self._fence(peer.landing, Failure(FailureCode.TRANSFER_FAILED, "the prefill node was fenced"))
        try:
            self._peers.greet(peer.address)
        except FabricError as error:  # the next fetch tries again
            log_event(log, "no landing", logging.WARNING, peer=peer.address.name, reason=str(error))

    def _fence(self, landing: Landing, failure: Failure) -> None:
        self._counters.fences += 1
        self._fabric.close_endpoint(landing)
        for attempt in self._attempts.of_landing(landing):
            self._do(attempt, attempt.transfer.on_fenced(failure))
