"""The prefill side of the messenger: accepts tickets, arms each announced chunk, reports how a transfer ended.

Everything here runs on the pump's thread. It keeps one session per decode instance (its landing, our sending endpoint)
and one `SenderTransfer` per accepted ticket; it asks the engine and the control plane through two small ports.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from fabric.api import EndpointFailed, Event, RailInDoubt, TransferEngine, WritesEnded, WritesFailed
from fabric.errors import FabricError
from kv_messenger.checksums import HeldPages, checksums, places
from kv_messenger.context import slot_checksums
from kv_messenger.credits import Credits, Prompt
from kv_messenger.last_words import LastWords, SendToPeer
from kv_messenger.lost_rails import LostRails
from kv_messenger.plan import TransferPlan
from kv_messenger.sender_transfer import (
    Action,
    Arm,
    Chunk,
    ReleaseSource,
    ReportFinished,
    ReportStopped,
    SenderTransfer,
    StopPosting,
)
from kv_messenger.sent import Sent, SentTable, engine_id
from kv_messenger.sessions import Session, Sessions, hello_refusal
from kv_messenger.sources import Source
from kv_messenger.withheld import GatedArming
from protocol.gates import Gates
from protocol.layout import KVLayout
from protocol.logs import event as log_event
from protocol.messages import (
    AbortTransfer,
    Failure,
    FailureCode,
    Hello,
    HelloRefused,
    Ping,
    Pong,
    PrefillAccepted,
    PrefillRefused,
    PrefillRequest,
    RailFenced,
    Welcome,
)
from protocol.ticket import TransferKey

log = logging.getLogger(__name__)


@dataclass
class SenderCounters:
    accepted: int = 0
    refused: int = 0
    finished: int = 0
    stopped: int = 0
    peers_lost: int = 0
    unknown_aborts: int = 0


@dataclass
class Sender:
    """`layout` is of every source's pools. `readable`: this process can read them, for checksums; not on a GPU."""

    instance: str
    compatibility: str
    layout: KVLayout
    fabric: TransferEngine
    sources: Sequence[Source]
    send: SendToPeer
    gates: Gates
    readable: bool = True
    clock: Callable[[], float] = time.monotonic
    counters: SenderCounters = field(default_factory=SenderCounters)
    _sent: SentTable = field(default_factory=SentTable)

    def __post_init__(self) -> None:
        self._sessions = Sessions(self.fabric, self.clock)
        self._lost_rails = LostRails(self.instance, self.fabric, self._sessions, self.send, self.clock)
        self._credits = Credits(self.layout)
        self._arming = GatedArming(self.gates, self._arm)
        self._last_words = LastWords(self.instance, self.send)

    @property
    def transfers(self) -> int:
        return len(self._sent)

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def waiting(self) -> int:
        """Prompts that no engine has been given yet: their decode nodes have taken their share of its memory."""
        return self._credits.waiting

    def wait_idle(self, timeout: float) -> bool:
        """From any thread: wait until no transfer is open. False if some still are."""
        return self._sent.wait_none(timeout)

    # ---- from the control plane ----

    def on_hello(self, hello: Hello) -> None:
        """Opens a session, or replaces the endpoint of one whose decode side fenced the old landing."""
        failure = hello_refusal(hello, self.instance, self.compatibility, self.layout)
        if failure is not None:
            self._refuse_hello(hello, failure)
            return
        session = self._sessions.get(hello.instance)
        if session is not None and session.landing < hello.landing:
            self._close(session, Failure(FailureCode.STALE_PEER, "the decode node opened a new landing"))
            session = None
        if session is None and not self._open_session(hello):
            return
        self.send(hello.instance, Welcome(instance=self.instance, landing=hello.landing, layout=self.layout))

    def on_ping(self, ping: Ping) -> None:
        """Answered also without a session: the peer learns which instance lives at this address."""
        self._sessions.seen(ping.instance)
        self.send(ping.instance, Pong(instance=self.instance))

    def on_prefill_request(self, request: PrefillRequest) -> None:
        key = request.ticket.key
        if key in self._sent or self._last_words.repeat(key):
            return
        session = self._sessions.get(key.instance)
        if session is None or session.landing != request.ticket.landing:
            self._refuse(key, Failure(FailureCode.STALE_PEER, "no session for this landing; say Hello first"))
            return
        if request.checksums and not self.readable:
            why = "the decode node compares pages (--debug-pages), and this prefill node's are in a GPU's memory"
            self._refuse(key, Failure(FailureCode.INCOMPATIBLE, why))
            return
        if not self._credits.may_wait(key.instance):
            self._refuse(key, Failure(FailureCode.OVERLOADED, "too many prompts of this decode node wait already"))
            return
        source = self._sent.least_busy(self.sources)
        plan = TransferPlan(
            self.layout, source.regions, session.layout, request.ticket, len(request.tokens), source.context
        )
        if reason := plan.refusal():
            self._refuse(key, Failure(FailureCode.INVALID, reason))
            return
        self._accept(request, plan, source)

    def on_abort(self, abort: AbortTransfer) -> None:
        sent = self._sent.get(abort.key)
        if sent is not None and sent.transfer.live:
            self._do(sent, sent.transfer.stop(None))
        elif not self._last_words.repeat(abort.key):
            self.counters.unknown_aborts += 1
            self._last_words.never_heard_of(abort.key)

    def on_rail_fenced(self, fenced: RailFenced) -> None:
        self._lost_rails.on_fenced(fenced)

    # ---- from the engines ----

    def on_chunks(self, chunks: Sequence[tuple[str, Chunk]]) -> None:
        """Announced before their forward: arm every layer's writes."""
        for request_id, chunk in chunks:
            sent = self._sent.of_request(request_id)
            if sent is not None:
                self._do(sent, sent.transfer.on_chunk(chunk))

    def on_forward_ended(self, request_ids: Sequence[str], started_ns: int, ended_ns: int) -> None:
        for request_id in request_ids:
            sent = self._sent.of_request(request_id)
            if sent is not None:
                self._do(sent, sent.transfer.on_forward_ended(started_ns, ended_ns))

    def on_engine_failed(self, request_id: str, failure: Failure) -> None:
        sent = self._sent.of_request(request_id)
        if sent is not None:
            self._do(sent, sent.transfer.stop(failure))

    # ---- from the pump ----

    def on_events(self, events: Sequence[Event]) -> None:
        """Ended batches are booked before failures are acted on, so that a Stopped names every write ever posted. A
        failed write breaks its endpoint, unless others of its rails go on, and the whole session goes; a decode node
        that lives says Hello again."""
        broken: dict[int, str] = {}
        for event in events:
            if isinstance(event, WritesFailed):
                broken[self._sent.endpoint_of(event.handle)] = str(event.error)
            elif isinstance(event, EndpointFailed):
                broken[event.endpoint] = str(event.error)
                self._lost_rails.on_endpoint_failed(event)
            elif isinstance(event, RailInDoubt):
                self._lost_rails.on_doubt(event)
            elif isinstance(event, WritesEnded):
                self._batch_ended(event)
        for endpoint, reason in broken.items():
            session = self._sessions.of_endpoint(endpoint)
            if session is not None:
                self._lose(session, reason)

    def on_tick(self, now: float) -> None:
        for session in self._sessions.silent(now):
            self._lose(session, "no heartbeat")
            self._sessions.forgive(session)
        for session in self._lost_rails.overdue(now):
            self._lose(session, "it does not answer for a rail that was lost")
        self._sessions.expire(now)
        self._stop(self._sent.expired(now), Failure(FailureCode.DEADLINE, "the request's deadline passed"))

    def on_gate_released(self) -> None:
        self._arming.on_released()

    def stop_all(self, failure: Failure) -> None:
        """The node is going down: every live transfer is stopped and reported, every endpoint closed."""
        for session in self._sessions.all():
            self._close(session, failure)

    # ---- inside ----

    def _open_session(self, hello: Hello) -> bool:
        try:
            session = self._sessions.open(hello)
        except FabricError as error:
            self._refuse_hello(hello, Failure(FailureCode.OVERLOADED, str(error)[:1000]))
            return False
        way, instance = self.fabric.provider_of(session.endpoint), hello.instance
        log_event(log, "session opened", peer=hello.name, peer_instance=instance, landing=hello.landing, provider=way)
        return True

    def _refuse_hello(self, hello: Hello, failure: Failure) -> None:
        log_event(log, "hello refused", logging.WARNING, peer=hello.name, reason=failure.message)
        self.send(hello.instance, HelloRefused(instance=self.instance, landing=hello.landing, failure=failure))

    def _accept(self, request: PrefillRequest, plan: TransferPlan, source: Source) -> None:
        key, tokens = request.ticket.key, request.tokens
        transfer = SenderTransfer(key, plan, time.monotonic_ns(), self.clock() + request.deadline_s)
        sent = Sent(transfer, source, request.checksums)
        self._sent.add(sent)
        self.counters.accepted += 1
        log_event(log, "prefill accepted", request=key.request, public_id=request.public_id, tokens=len(tokens))
        self.send(key.instance, PrefillAccepted(instance=self.instance, key=key))
        self._credits.ask(Prompt(sent, tokens))
        self._submit()

    def _submit(self) -> None:
        """To their engines, what has credit."""
        for sent, tokens in self._credits.grant(alone=len(self._sessions) < 2):
            name = engine_id(sent.transfer.key)
            sent.source.engine.submit(name, tokens, partial(self.on_engine_failed, name))

    def _refuse(self, key: TransferKey, failure: Failure) -> None:
        self.counters.refused += 1
        log_event(
            log, "prefill refused", logging.WARNING, request=key.request, attempt=key.attempt, reason=failure.message
        )
        self.send(key.instance, PrefillRefused(instance=self.instance, key=key, failure=failure))

    def _batch_ended(self, event: WritesEnded) -> None:
        sent = self._sent.ended(event.handle)
        if sent is not None:
            self._do(sent, sent.transfer.on_batch_ended(event))

    def _lose(self, session: Session, reason: str) -> None:
        self.counters.peers_lost += 1
        log_event(log, "decode node lost", logging.WARNING, peer=session.name, reason=reason)
        self._close(session, Failure(FailureCode.STALE_PEER, f"session lost: {reason}"[:1000]))

    def _close(self, session: Session, failure: Failure) -> None:
        """Stop its transfers, then close its endpoint: the batches end with the next events, and release the pages."""
        self._stop(self._sent.to_instance(session.instance), failure)
        self._sessions.close(session)

    def _stop(self, several: Sequence[Sent], failure: Failure) -> None:
        """Together: none of them gets the credit of another."""
        for sent in several:
            self._credits.withdraw(sent.transfer.key)
        for sent in several:
            self._do(sent, sent.transfer.stop(failure))

    def _do(self, sent: Sent, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Arm():
                    self._arming.arm(sent, action)
                case StopPosting():
                    self._stop_posting(sent, action)
                case ReportFinished():
                    self.counters.finished += 1
                    self._last_words.finished(sent.transfer.key, action, self._checksums(sent))
                case ReportStopped():
                    self.counters.stopped += 1
                    self._last_words.stopped(sent.transfer.key, action)
                case ReleaseSource():
                    self._release(sent)

    def _arm(self, sent: Sent, arm: Arm) -> None:
        """What the fabric does not take is this transfer's failure alone."""
        if not sent.transfer.live:  # of the same chunk, behind one that was not taken
            return
        key = sent.transfer.key
        session = self._sessions.get(key.instance)
        assert session is not None, "a live transfer has a session"
        try:
            if arm.threshold is None:
                handle = self.fabric.write(session.endpoint, arm.writes)
            else:
                handle = self.fabric.write_when(session.endpoint, sent.source.word_address, arm.threshold, arm.writes)
        except FabricError as error:
            failure = Failure(FailureCode.TRANSFER_FAILED, f"writes not taken: {error}"[:1000])
            self._do(sent, sent.transfer.stop(failure))
            return
        self._sent.posted(handle, key, session.endpoint.id)
        sent.transfer.on_armed(handle)

    def _stop_posting(self, sent: Sent, action: StopPosting) -> None:
        key = sent.transfer.key
        self._credits.withdraw(key)
        if self._credits.granted(key):
            sent.source.engine.abort(engine_id(key))
        totals = [self.fabric.cancel(handle) for handle in action.handles]
        posted = sum(posted for posted, _ in totals)
        completed = sum(completed for _, completed in totals)
        self._do(sent, sent.transfer.on_cancelled(posted, completed))

    def _release(self, sent: Sent) -> None:
        key = sent.transfer.key
        if self._credits.granted(key):
            self._credits.give_back(key)
            sent.source.engine.release(engine_id(key))
        self._sent.remove(key)  # last: without transfers, the engine may be stopped
        self._submit()

    def _checksums(self, sent: Sent) -> bytes | None:
        """Of the source's replica set that was assigned to each of the target's."""
        if not sent.checksums:
            return None
        plan = sent.transfer.plan
        held = HeldPages(self.layout, sent.source.pools, sent.transfer.tables)
        moved = list(places(plan.target, plan.tokens, plan.ticket.first_page))
        context = slot_checksums(plan.context, sent.transfer.context_slot, self.layout.context, plan.target.context)
        return checksums(held, plan.assigned, moved) + context
