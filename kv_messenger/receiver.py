"""The decode side of the messenger: arms immediates, sends tickets, and decides when KV is there and pages are safe.

Everything here runs on the pump's thread. It keeps one landing endpoint per prefill instance and one
`ReceiverTransfer` per attempt. Closing a landing is the fence; where the provider allows that only for a dead peer, a
lost peer's landing lingers, and its pages stay quarantined, until the peer is proven dead or has accounted for them.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fabric.api import Arrived, EndpointFailed, Event, Landing, MemoryRegion, OverCounted, TransferEngine
from fabric.errors import FabricError
from fabric.immediates import ImmediateSlots
from kv_messenger.attempts import Arrival, Attempt, Attempts, Fetch
from kv_messenger.checksums import first_difference, page_checksums
from kv_messenger.peers import Introduction, Peer, PrefillPeers, SendToPeer
from kv_messenger.plan import expected_writes
from kv_messenger.receiver_transfer import (
    AccountClosed,
    Action,
    AskToStop,
    Decided,
    NeedFence,
    Outcome,
    ReceiverTransfer,
    Revise,
)
from protocol.logs import event as log_event
from protocol.messages import (
    AbortTransfer,
    Failure,
    FailureCode,
    HelloRefused,
    PrefillRefused,
    PrefillRequest,
    PrefillTimes,
    Stopped,
    TransferFinished,
    Welcome,
)
from protocol.ticket import RankTicket, TransferKey, TransferTicket

log = logging.getLogger(__name__)


class ReceiverOwner(Protocol):
    """The decode node. Called on the pump's thread; must return at once. Each key gets exactly one of `kv_arrived` and
    `kv_failed` (none if it was cancelled), and exactly one `pages_safe`, in any order."""

    def kv_arrived(self, arrival: Arrival) -> None: ...

    def kv_failed(self, key: TransferKey, failure: Failure) -> None: ...

    def pages_safe(self, key: TransferKey) -> None: ...

    def prefill_timed(self, key: TransferKey, times: PrefillTimes) -> None: ...


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


@dataclass
class Receiver:
    """`region` is the registered page pool. `hang_up` closes the control link to an instance. `checksums`: compare one
    per page before a request may be resumed (debug mode)."""

    me: Introduction
    fabric: TransferEngine
    region: MemoryRegion
    owner: ReceiverOwner
    send: SendToPeer
    hang_up: Callable[[str], None]
    checksums: bool = False
    counters: ReceiverCounters = field(default_factory=ReceiverCounters)
    _slots: ImmediateSlots = field(default_factory=ImmediateSlots)
    _attempts: Attempts = field(default_factory=Attempts)

    def __post_init__(self) -> None:
        self._peers = PrefillPeers(self.me, self.fabric, self.send)
        self._layout = self.me.layout

    @property
    def transfers(self) -> int:
        return len(self._attempts)

    @property
    def slots_free(self) -> int:
        return self._slots.free

    @property
    def peers(self) -> int:
        return len(self._peers)

    @property
    def lingering_landings(self) -> int:
        return len(self._peers.lingering)

    # ---- from the node ----

    def fetch(self, fetch: Fetch) -> None:
        """Open an attempt. Its outcome comes through the owner's methods, also when it fails at once."""
        immediate = self._slots.take()
        if immediate is None:
            self._refuse(fetch, Failure(FailureCode.OVERLOADED, "all transfer slots are in use"))
            return
        try:
            peer = self._peers.reach(fetch.peer)
        except FabricError as error:
            self._slots.give_back(immediate)
            self._refuse(fetch, Failure(FailureCode.TRANSFER_FAILED, str(error)[:1000]))
            return
        expected = expected_writes(self._layout, self._layout, len(fetch.tokens), fetch.first_page)
        expectation = self.fabric.expect(peer.landing, immediate, expected)
        transfer = ReceiverTransfer(fetch.key, expected, time.monotonic() + fetch.deadline_s, self.checksums)
        self._attempts.add(Attempt(fetch, transfer, peer.landing, immediate, expectation))
        self.counters.requested += 1
        request = self._prefill_request(fetch, peer, immediate)
        if peer.welcomed:
            self.send(peer.address, request)
        else:
            peer.waiting.append(request)

    def abort(self, key: TransferKey, failure: Failure | None) -> None:
        attempt = self._attempts.get(key)
        if attempt is not None:
            self._do(attempt, attempt.transfer.abort(time.monotonic(), failure))

    def peer_dead(self, instance: str) -> None:
        """The peer's process is proven gone: another instance answers at its address, or nobody listens there."""
        peer = self._peers.get(instance)
        if peer is not None:
            self._lose(peer, "its process is gone", proven_dead=True)
        for owner, landing in self._peers.lingering:
            if owner == instance:
                self._peers.forget_lingering(landing)
                self._fence(landing, Failure(FailureCode.NODE_LOST, "prefill node is gone"))

    def stop_all(self, failure: Failure) -> None:
        """The node is going down: fail what is open and ask every sender to stop. Closing the fabric is the fence."""
        for attempt in self._attempts.all():
            self._do(attempt, attempt.transfer.abort(time.monotonic(), failure))

    def wait_idle(self, timeout: float) -> bool:
        """From any thread: wait until no transfer is open. False if some still are."""
        return self._attempts.wait_none(timeout)

    # ---- from the control plane ----

    def on_welcome(self, welcome: Welcome) -> None:
        peer = self._peers.welcome(welcome.instance, welcome.landing)
        if peer is None:
            return
        waiting, peer.waiting = peer.waiting, []
        for request in waiting:
            self.send(peer.address, request)
        log_event(log, "prefill node connected", peer=peer.address.name, peer_instance=welcome.instance)

    def on_hello_refused(self, asked: str, refused: HelloRefused) -> None:
        """`asked`: the instance that we meant to reach. It will never write to us."""
        peer = self._peers.get(asked)
        if peer is None or peer.number != refused.landing or peer.welcomed:
            return
        reason = refused.failure.message
        log_event(log, "prefill node refuses us", logging.WARNING, peer=peer.address.name, reason=reason)
        self._peers.forget(peer)
        self.hang_up(asked)
        self._fence(peer.landing, refused.failure)

    def on_seen(self, instance: str) -> None:
        self._peers.seen(instance)

    def on_refused(self, refused: PrefillRefused) -> None:
        attempt = self._known(refused.instance, refused.key)
        if attempt is not None:
            self._do(attempt, attempt.transfer.on_refused(refused.failure))
            self._renew_if_stale(attempt, refused.failure)

    def on_finished(self, finished: TransferFinished) -> None:
        self.owner.prefill_timed(finished.key, finished.times)
        attempt = self._attempts.asked_of(finished.instance, finished.key)
        if attempt is not None:
            actions = attempt.transfer.on_finished(time.monotonic(), finished.posted, finished.checksums)
            self._do(attempt, actions)

    def on_stopped(self, stopped: Stopped) -> None:
        attempt = self._known(stopped.instance, stopped.key)
        if attempt is not None:
            self._do(attempt, attempt.transfer.on_stopped(time.monotonic(), stopped.posted, stopped.failure))
            self._renew_if_stale(attempt, stopped.failure)

    # ---- from the pump ----

    def on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Arrived() | OverCounted():
                    self._counted(event)
                case EndpointFailed():
                    peer = self._peers.of_landing(event.endpoint)
                    if peer is not None:
                        self._lose(peer, str(event.error), proven_dead=False)

    def on_tick(self, now: float) -> None:
        self._peers.ping(now)
        for peer in self._peers.silent(now):
            self._lose(peer, "no heartbeat", proven_dead=False)
        for instance, landing in self._peers.lingering:
            if not self._attempts.of_landing(landing):
                self._close_lingering(instance, landing)
        for attempt in self._attempts.all():
            self._do(attempt, attempt.transfer.on_tick(now))

    # ---- inside ----

    def _refuse(self, fetch: Fetch, failure: Failure) -> None:
        """Before anything was armed or sent."""
        self.counters.failed += 1
        self.owner.kv_failed(fetch.key, failure)
        self.owner.pages_safe(fetch.key)

    def _prefill_request(self, fetch: Fetch, peer: Peer, immediate: int) -> PrefillRequest:
        remote = self.region.remote
        rank = RankTicket(
            region_key=remote.key,
            region_base=remote.base,
            region_length=remote.length,
            blocks=list(fetch.blocks),
            immediate=immediate,
        )
        ticket = TransferTicket(key=fetch.key, landing=peer.number, first_page=fetch.first_page, ranks=[rank])
        return PrefillRequest(
            ticket=ticket, public_id=fetch.public_id, tokens=list(fetch.tokens), deadline_s=fetch.deadline_s
        )

    def _known(self, instance: str, key: TransferKey) -> Attempt | None:
        attempt = self._attempts.asked_of(instance, key)
        if attempt is None:
            self.counters.unknown_completions += 1
        return attempt

    def _counted(self, event: Arrived | OverCounted) -> None:
        attempt = self._attempts.of_expectation(event.handle)
        if attempt is None:  # an earlier event of the same batch closed it
            return
        if isinstance(event, Arrived):
            attempt.arrived_ns = event.last_ns
            self._do(attempt, attempt.transfer.on_arrived(event.count))
        else:
            self._do(attempt, attempt.transfer.on_over_counted(event.count))

    def _do(self, attempt: Attempt, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Decided():
                    self._decided(attempt, action)
                case AccountClosed():
                    self._account_closed(attempt)
                case AskToStop():
                    self._ask_to_stop(attempt)
                case Revise():
                    self.fabric.revise(attempt.expectation, action.count)
                case NeedFence():
                    self._fence_alive(attempt, action.reason)
        if attempt.over:
            self._attempts.remove(attempt)

    def _ask_to_stop(self, attempt: Attempt) -> None:
        peer = self._peers.of_landing(attempt.landing.id)
        if peer is not None and peer.withdraw(attempt.fetch.key):
            self._do(attempt, attempt.transfer.on_never_sent())
        else:
            self.send(attempt.fetch.peer, AbortTransfer(key=attempt.fetch.key))

    def _decided(self, attempt: Attempt, decided: Decided) -> None:
        key = attempt.fetch.key
        failure = decided.failure
        if decided.outcome is Outcome.ARRIVED:
            failure = self._compare(attempt)
            if failure is None:
                self._arrived(attempt)
                return
        if decided.outcome is Outcome.CANCELLED:
            self.counters.cancelled += 1
            return
        assert failure is not None
        self.counters.failed += 1
        log_event(
            log, "transfer failed", logging.WARNING, request=key.request, attempt=key.attempt, reason=failure.message
        )
        self.owner.kv_failed(key, failure)

    def _arrived(self, attempt: Attempt) -> None:
        key, writes = attempt.fetch.key, attempt.transfer.expected
        moved = writes * self._layout.page_bytes
        self.counters.arrived += 1
        self.counters.writes += writes
        self.counters.bytes += moved
        log_event(log, "kv arrived", request=key.request, attempt=key.attempt, writes=writes, bytes=moved)
        self.owner.kv_arrived(Arrival(key, writes, moved, attempt.arrived_ns))

    def _compare(self, attempt: Attempt) -> Failure | None:
        """Debug mode: every page against its source's checksum."""
        theirs = attempt.transfer.checksums
        if not self.checksums:
            return None
        ours = page_checksums(self.region.address, self._layout, attempt.fetch.blocks)
        difference = first_difference(ours, theirs or b"", len(attempt.fetch.blocks))
        if difference is None:
            return None
        self.counters.checksum_errors += 1
        return Failure(FailureCode.TRANSFER_FAILED, f"KV differs on arrival: {difference}")

    def _account_closed(self, attempt: Attempt) -> None:
        self.fabric.forget(attempt.expectation)
        self._slots.give_back(attempt.immediate)
        self.owner.pages_safe(attempt.fetch.key)

    def _lose(self, peer: Peer, reason: str, proven_dead: bool) -> None:
        """Give up on a peer: every transfer from it fails now, and its landing is closed as soon as that is allowed."""
        instance, name = peer.address.instance, peer.address.name
        self.counters.peers_lost += 1
        log_event(log, "prefill node lost", logging.WARNING, peer=name, peer_instance=instance, reason=reason)
        failure = Failure(FailureCode.NODE_LOST, f"prefill node {name} lost: {reason}"[:1000])
        for attempt in self._attempts.of_landing(peer.landing):
            self._do(attempt, attempt.transfer.on_peer_lost(failure))
            if peer.withdraw(attempt.fetch.key):
                self._do(attempt, attempt.transfer.on_never_sent())
        if proven_dead or not self.fabric.fence_needs_dead_peer:
            self._peers.forget(peer)
            self.hang_up(instance)
            self._fence(peer.landing, failure)
        else:
            self._peers.linger(peer)

    def _close_lingering(self, instance: str, landing: Landing) -> None:
        """All its writes are accounted for, so nothing arrives and closing is safe."""
        self._peers.forget_lingering(landing)
        self.fabric.close_endpoint(landing)
        if not self._peers.knows(instance):
            self.hang_up(instance)

    def _fence_alive(self, attempt: Attempt, reason: str) -> None:
        """A transfer can be settled only by fencing a peer that still answers: all its transfers go down with it."""
        peer = self._peers.of_landing(attempt.landing.id)
        if peer is not None and not self.fabric.fence_needs_dead_peer:
            log_event(log, "fencing", logging.WARNING, peer=peer.address.name, reason=reason)
            self._renew(peer)

    def _renew_if_stale(self, attempt: Attempt, failure: Failure | None) -> None:
        """The peer has no session for this landing (any more): it needs a fresh one, unless it got one already."""
        peer = self._peers.of_landing(attempt.landing.id)
        if peer is not None and failure is not None and failure.code is FailureCode.STALE_PEER:
            self._renew(peer)

    def _renew(self, peer: Peer) -> None:
        """Fence a live peer and greet it again on a fresh landing."""
        if self.fabric.fence_needs_dead_peer and self._attempts.of_landing(peer.landing):
            self._peers.linger(peer)
        else:
            self._peers.forget(peer)
            self._fence(peer.landing, Failure(FailureCode.TRANSFER_FAILED, "the prefill node was fenced"))
        try:
            self._peers.greet(peer.address)
        except FabricError as error:  # the next fetch tries again
            log_event(log, "no landing", logging.WARNING, peer=peer.address.name, reason=str(error))

    def _fence(self, landing: Landing, failure: Failure) -> None:
        self.counters.fences += 1
        self.fabric.close_endpoint(landing)
        for attempt in self._attempts.of_landing(landing):
            self._do(attempt, attempt.transfer.on_fenced(failure))
