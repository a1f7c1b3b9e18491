"""The decode side of the messenger: arms immediates, sends tickets, and decides when KV is there and pages are safe.

Everything here runs on the pump's thread. It keeps one landing endpoint per prefill instance and one
`ReceiverTransfer` per attempt. How many writes make a transfer whole depends on the source's layout too, so a ticket
leaves, and its writes are expected, once its peer has welcomed us.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fabric.api import Arrived, EndpointFailed, Event, OverCounted, TransferEngine
from fabric.errors import FabricError
from fabric.immediates import ImmediateSlots
from kv_messenger.attempts import Arrival, Attempt, Attempts, Fetch, ReceiverCounters
from kv_messenger.checksums import HeldPages, checksums, first_difference, places
from kv_messenger.context import slot_checksums
from kv_messenger.fencing import Fencing
from kv_messenger.peers import Introduction, Peer, PrefillPeers, SendToPeer
from kv_messenger.plan import expected
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
from kv_messenger.sharding import refuse_pair
from kv_messenger.targets import Target, TargetOwner
from protocol.logs import event as log_event
from protocol.messages import (
    AbortTransfer,
    Failure,
    FailureCode,
    HelloRefused,
    PrefillRefused,
    PrefillRequest,
    RailLost,
    Stopped,
    TransferFinished,
    Welcome,
)
from protocol.ticket import TransferKey, TransferTicket

log = logging.getLogger(__name__)


@dataclass
class Receiver:
    """`hang_up` closes the control link to an instance. `debug`: want checksums of what was moved, and compare them
    before a request may be resumed."""

    me: Introduction
    fabric: TransferEngine
    targets: Sequence[Target]
    send: SendToPeer
    hang_up: Callable[[str], None]
    debug: bool = False
    clock: Callable[[], float] = time.monotonic
    counters: ReceiverCounters = field(default_factory=ReceiverCounters)
    _slots: ImmediateSlots = field(default_factory=ImmediateSlots)
    _attempts: Attempts = field(default_factory=Attempts)

    def __post_init__(self) -> None:
        self._peers = PrefillPeers(self.me, self.fabric, self.send, self.clock)
        self._fencing = Fencing(self.fabric, self._peers, self._attempts, self.counters, self.hang_up, self._do)

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
        """Open an attempt. Its outcome comes through the target's owner, also when it fails at once."""
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
        transfer = ReceiverTransfer(fetch.key, self.clock() + fetch.deadline_s, self.debug)
        attempt = Attempt(fetch, transfer, peer.landing, immediate)
        self._attempts.add(attempt)
        self.counters.requested += 1
        if peer.layout is None:
            peer.waiting.append(fetch.key)
        else:
            self._ask(peer, attempt)

    def abort(self, key: TransferKey, failure: Failure | None) -> None:
        attempt = self._attempts.get(key)
        if attempt is not None:
            self._do(attempt, attempt.transfer.abort(self.clock(), failure))

    def peer_dead(self, instance: str) -> None:
        """The peer's process is proven gone: another instance answers at its address, or nobody listens there."""
        self._fencing.peer_dead(instance)

    def stop_all(self, failure: Failure) -> None:
        """The node is going down: fail what is open and ask every sender to stop. Closing the fabric is the fence."""
        for attempt in self._attempts.all():
            self._do(attempt, attempt.transfer.abort(self.clock(), failure))

    def wait_idle(self, timeout: float) -> bool:
        """From any thread: wait until no transfer is open. False if some still are."""
        return self._attempts.wait_none(timeout)

    # ---- from the control plane ----

    def on_welcome(self, welcome: Welcome) -> None:
        peer = self._peers.greeted(welcome.instance, welcome.landing)
        if peer is None:
            return
        if reason := refuse_pair(welcome.layout, self.me.layout):
            self._fencing.refused(peer, Failure(FailureCode.INCOMPATIBLE, reason))
            return
        peer.layout, peer.last_seen = welcome.layout, self.clock()
        log_event(log, "prefill node connected", peer=peer.address.name, peer_instance=welcome.instance)
        waiting, peer.waiting = peer.waiting, []
        for key in waiting:
            attempt = self._attempts.get(key)
            assert attempt is not None, f"{key} waits for a peer, but is over"
            self._ask(peer, attempt)

    def on_hello_refused(self, asked: str, refused: HelloRefused) -> None:
        """`asked`: the instance that we meant to reach."""
        peer = self._peers.greeted(asked, refused.landing)
        if peer is not None:
            self._fencing.refused(peer, refused.failure)

    def on_seen(self, instance: str) -> None:
        self._peers.seen(instance)

    def on_refused(self, refused: PrefillRefused) -> None:
        attempt = self._known(refused.instance, refused.key)
        if attempt is not None:
            self._do(attempt, attempt.transfer.on_refused(refused.failure))
            self._fencing.renew_if_stale(attempt, refused.failure)

    def on_finished(self, finished: TransferFinished) -> None:
        for target in self.targets:  # its attempt may be over by now, and forgotten
            target.owner.prefill_timed(finished.key, finished.times)
        attempt = self._attempts.asked_of(finished.instance, finished.key)
        if attempt is not None:
            actions = attempt.transfer.on_finished(self.clock(), finished.posted, finished.checksums)
            self._do(attempt, actions)

    def on_stopped(self, stopped: Stopped) -> None:
        attempt = self._known(stopped.instance, stopped.key)
        if attempt is not None:
            self._do(attempt, attempt.transfer.on_stopped(self.clock(), stopped.posted, stopped.failure))
            self._fencing.renew_if_stale(attempt, stopped.failure)

    def on_rail_lost(self, lost: RailLost) -> None:
        """Of the landing that the peer has now: another one is fenced as a whole, or about to be."""
        peer = self._peers.get(lost.instance)
        answer = self._fencing.fence_rails(peer, lost, self.clock()) if peer and peer.number == lost.landing else None
        if peer is not None and answer is not None:
            self.send(peer.address, answer)

    # ---- from the pump ----

    def on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Arrived() | OverCounted():
                    self._counted(event)
                case EndpointFailed():
                    peer = self._peers.of_landing(event.endpoint)
                    if peer is not None:
                        self._fencing.lose(peer, str(event.error))

    def on_tick(self, now: float) -> None:
        self._peers.ping(now)
        for peer in self._peers.silent(now):
            self._fencing.lose(peer, "no heartbeat")
        self._fencing.close_accounted()
        self._fencing.renew_lame(now)
        for attempt in self._attempts.all():
            self._do(attempt, attempt.transfer.on_tick(now))

    # ---- inside ----

    def _owner(self, attempt: Attempt) -> TargetOwner:
        return self.targets[attempt.fetch.target].owner

    def _refuse(self, fetch: Fetch, failure: Failure) -> None:
        """Before anything was armed or sent."""
        self.counters.failed += 1
        owner = self.targets[fetch.target].owner
        owner.kv_failed(fetch.key, failure)
        owner.pages_safe(fetch.key)

    def _ask(self, peer: Peer, attempt: Attempt) -> None:
        """Expect the writes, then send the ticket for them."""
        fetch = attempt.fetch
        assert peer.layout is not None, "it has welcomed us"
        writes, attempt.bytes = expected(peer.layout, self.me.layout, len(fetch.tokens), fetch.first_page)
        attempt.transfer.expected = writes
        self._attempts.expecting(attempt, self.fabric.expect(attempt.landing, attempt.immediate, writes))
        ticket = TransferTicket(
            key=fetch.key,
            landing=peer.number,
            first_page=fetch.first_page,
            immediate=attempt.immediate,
            blocks=[list(table) for table in fetch.tables],
            regions=self.targets[fetch.target].remote,
            context=self.targets[fetch.target].context_slot(fetch.context_slot),
        )
        remaining = max(0.0, attempt.transfer.deadline - self.clock())
        self.send(
            peer.address,
            PrefillRequest(
                ticket=ticket,
                public_id=fetch.public_id,
                tokens=list(fetch.tokens),
                deadline_s=remaining,
                checksums=self.debug,
            ),
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
            attempt.arrived_ns, attempt.provider = event.last_ns, self.fabric.provider_of(attempt.landing)
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
                    assert attempt.expectation is not None, "only a peer that was asked can have stopped"
                    self.fabric.revise(attempt.expectation, action.count)
                case NeedFence():
                    self._fencing.settle(attempt, action.reason)
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
        self._owner(attempt).kv_failed(key, failure)

    def _arrived(self, attempt: Attempt) -> None:
        key, writes, moved = attempt.fetch.key, attempt.transfer.expected, attempt.bytes
        self.counters.arrived += 1
        self.counters.writes += writes
        self.counters.bytes += moved
        way = attempt.provider
        self._owner(attempt).kv_arrived(Arrival(key, writes, moved, attempt.arrived_ns, way))
        log_event(log, "kv arrived", request=key.request, attempt=key.attempt, writes=writes, bytes=moved, provider=way)

    def _compare(self, attempt: Attempt) -> Failure | None:
        """Debug mode: what arrived in each replica set, against its source's checksums."""
        if not self.debug:
            return None
        fetch, layout, target = attempt.fetch, self.me.layout, self.targets[attempt.fetch.target]
        held = HeldPages(layout, target.pools, fetch.tables, fetch.first_page)
        moved = list(places(layout, len(fetch.tokens), fetch.first_page))
        ours = checksums(held, range(layout.replica_sets), moved)
        ours += slot_checksums(target.context, fetch.context_slot, layout.context, layout.context)
        difference = first_difference(ours, attempt.transfer.checksums or b"", moved, layout.context.names)
        if difference is None:
            return None
        self.counters.checksum_errors += 1
        return Failure(FailureCode.TRANSFER_FAILED, f"KV differs on arrival: {difference}")

    def _account_closed(self, attempt: Attempt) -> None:
        if attempt.expectation is not None:
            self.fabric.forget(attempt.expectation)
        self._slots.give_back(attempt.immediate)
        self._owner(attempt).pages_safe(attempt.fetch.key)
