"""The prefill side of the messenger: accepts tickets, arms each announced chunk, reports how a transfer ended.

Everything here runs on the pump's thread. It keeps one session per decode instance (its landing, our sending endpoint)
and one `SenderTransfer` per accepted ticket; it asks the engine and the control plane through two small ports.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from fabric.api import EndpointFailed, Event, MemoryRegion, TransferEngine, WritesEnded, WritesFailed
from fabric.errors import FabricError
from kv_messenger.checksums import page_checksums
from kv_messenger.plan import TransferPlan, refuse_pair
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
from kv_messenger.sessions import Session, Sessions
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
    Stopped,
    TransferFinished,
    Welcome,
)
from protocol.ticket import TransferKey

REMEMBERED_ENDS = 4096

log = logging.getLogger(__name__)


class EnginePort(Protocol):
    """The prefill engine, as the sender needs it. Calls return at once and are carried out in order, on its thread."""

    def submit(self, request_id: str, tokens: Sequence[int], refused: Callable[[Failure], None]) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def release(self, request_id: str) -> None: ...


SendToPeer = Callable[[str, msgspec.Struct], None]
"""(decode instance, message); never blocks."""


@dataclass
class SenderCounters:
    accepted: int = 0
    refused: int = 0
    finished: int = 0
    stopped: int = 0
    peers_lost: int = 0
    unknown_aborts: int = 0


@dataclass(frozen=True, slots=True)
class _Armed:
    """Whose batch a handle is, and on which endpoint."""

    key: TransferKey
    endpoint: int


@dataclass
class Sender:
    """`region` is the registered page pool, `word_address` the engine's progress word. `checksums`: send one per page
    (debug mode)."""

    instance: str
    compatibility: str
    layout: KVLayout
    fabric: TransferEngine
    region: MemoryRegion
    word_address: int
    engine: EnginePort
    send: SendToPeer
    gates: Gates
    checksums: bool = False
    counters: SenderCounters = field(default_factory=SenderCounters)
    _transfers: dict[TransferKey, SenderTransfer] = field(default_factory=dict)
    _by_request: dict[str, TransferKey] = field(default_factory=dict)
    _by_handle: dict[int, _Armed] = field(default_factory=dict)
    _ends: OrderedDict[TransferKey, Stopped | TransferFinished] = field(default_factory=OrderedDict)
    _idle: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._idle.set()
        self._sessions = Sessions(self.fabric)
        self._arming = GatedArming(self.gates, self._arm)

    @property
    def transfers(self) -> int:
        return len(self._transfers)

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def wait_idle(self, timeout: float) -> bool:
        """From any thread: wait until no transfer is open. False if some still are."""
        return self._idle.wait(timeout)

    # ---- from the control plane ----

    def on_hello(self, hello: Hello) -> None:
        """Opens a session, or replaces the endpoint of one whose decode side fenced the old landing."""
        failure = self._hello_refusal(hello)
        if failure is not None:
            self._refuse_hello(hello, failure)
            return
        session = self._sessions.get(hello.instance)
        if session is not None and session.landing < hello.landing:
            self._close(session, Failure(FailureCode.STALE_PEER, "the decode node opened a new landing"))
            session = None
        if session is None and not self._open_session(hello):
            return
        self.send(hello.instance, Welcome(instance=self.instance, landing=hello.landing))

    def on_ping(self, ping: Ping) -> None:
        """Answered also without a session: the peer learns which instance lives at this address."""
        self._sessions.seen(ping.instance)
        self.send(ping.instance, Pong(instance=self.instance))

    def on_prefill_request(self, request: PrefillRequest) -> None:
        key = request.ticket.key
        if key in self._transfers:
            return
        if key in self._ends:
            self.send(key.instance, self._ends[key])
            return
        plan = TransferPlan(self.layout, self.region, request.ticket, len(request.tokens))
        failure = self._refuse_request(request, plan)
        if failure is not None:
            self._refuse(key, failure)
            return
        transfer = SenderTransfer(key, plan, time.monotonic_ns(), time.monotonic() + request.deadline_s)
        self._transfers[key] = transfer
        self._idle.clear()
        self._by_request[engine_id(key)] = key
        self.counters.accepted += 1
        log_event(log, "prefill accepted", request=key.request, public_id=request.public_id, tokens=len(request.tokens))
        self.send(key.instance, PrefillAccepted(instance=self.instance, key=key))
        self.engine.submit(engine_id(key), request.tokens, lambda why: self.on_engine_failed(engine_id(key), why))

    def on_abort(self, abort: AbortTransfer) -> None:
        transfer = self._transfers.get(abort.key)
        if transfer is not None and transfer.live:
            self._do(transfer, transfer.stop(None))
        elif abort.key in self._ends:
            self.send(abort.key.instance, self._ends[abort.key])
        else:
            self.counters.unknown_aborts += 1
            never = Stopped(instance=self.instance, key=abort.key, posted=0, completed=0, failure=None)
            self.send(abort.key.instance, never)

    # ---- from the engine ----

    def on_chunks(self, chunks: Sequence[tuple[str, Chunk]]) -> None:
        """Announced before their forward: arm every layer's writes."""
        for request_id, chunk in chunks:
            transfer = self._of_request(request_id)
            if transfer is not None:
                self._do(transfer, transfer.on_chunk(chunk))

    def on_forward_ended(self, request_ids: Sequence[str], started_ns: int, ended_ns: int) -> None:
        for request_id in request_ids:
            transfer = self._of_request(request_id)
            if transfer is not None:
                self._do(transfer, transfer.on_forward_ended(started_ns, ended_ns))

    def on_engine_failed(self, request_id: str, failure: Failure) -> None:
        transfer = self._of_request(request_id)
        if transfer is not None:
            self._do(transfer, transfer.stop(failure))

    # ---- from the pump ----

    def on_events(self, events: Sequence[Event]) -> None:
        """Ended batches are booked before failures are acted on, so that a Stopped names every write ever posted. A
        failed write breaks its endpoint, and the whole session goes; a decode node that lives says Hello again."""
        broken: dict[int, str] = {}
        for event in events:
            if isinstance(event, WritesFailed):
                broken[self._by_handle[event.handle].endpoint] = str(event.error)
            elif isinstance(event, EndpointFailed):
                broken[event.endpoint] = str(event.error)
            elif isinstance(event, WritesEnded):
                self._batch_ended(event)
        for endpoint, reason in broken.items():
            session = self._sessions.of_endpoint(endpoint)
            if session is not None:
                self._lose(session, reason)

    def on_tick(self, now: float) -> None:
        for session in self._sessions.silent(now):
            self._lose(session, "no heartbeat")
        for transfer in [t for t in self._transfers.values() if t.live and now >= t.deadline]:
            self._do(transfer, transfer.stop(Failure(FailureCode.DEADLINE, "the request's deadline passed")))

    def on_gate_released(self) -> None:
        self._arming.on_released()

    def stop_all(self, failure: Failure) -> None:
        """The node is going down: every live transfer is stopped and reported, every endpoint closed."""
        for session in self._sessions.all():
            self._close(session, failure)

    # ---- inside ----

    def _open_session(self, hello: Hello) -> bool:
        try:
            self._sessions.open(hello)
        except FabricError as error:
            self._refuse_hello(hello, Failure(FailureCode.OVERLOADED, str(error)[:1000]))
            return False
        log_event(log, "session opened", peer=hello.name, peer_instance=hello.instance, landing=hello.landing)
        return True

    def _refuse_hello(self, hello: Hello, failure: Failure) -> None:
        log_event(log, "hello refused", logging.WARNING, peer=hello.name, reason=failure.message)
        self.send(hello.instance, HelloRefused(instance=self.instance, landing=hello.landing, failure=failure))

    def _hello_refusal(self, hello: Hello) -> Failure | None:
        if hello.expects != self.instance:
            return Failure(FailureCode.STALE_PEER, f"this is instance {self.instance}, not {hello.expects}")
        if hello.compatibility != self.compatibility:
            reason = refuse_pair(self.layout, hello.layout) or "model, tokenizer or protocol version differ"
            return Failure(FailureCode.INCOMPATIBLE, reason)
        return None

    def _refuse_request(self, request: PrefillRequest, plan: TransferPlan) -> Failure | None:
        session = self._sessions.get(request.ticket.key.instance)
        if session is None or session.landing != request.ticket.landing:
            return Failure(FailureCode.STALE_PEER, "no session for this landing; say Hello first")
        reason = plan.refusal()
        return Failure(FailureCode.INVALID, reason) if reason else None

    def _refuse(self, key: TransferKey, failure: Failure) -> None:
        self.counters.refused += 1
        log_event(
            log, "prefill refused", logging.WARNING, request=key.request, attempt=key.attempt, reason=failure.message
        )
        self.send(key.instance, PrefillRefused(instance=self.instance, key=key, failure=failure))

    def _of_request(self, request_id: str) -> SenderTransfer | None:
        key = self._by_request.get(request_id)
        return self._transfers[key] if key is not None else None

    def _batch_ended(self, event: WritesEnded) -> None:
        transfer = self._transfers.get(self._by_handle.pop(event.handle).key)
        if transfer is not None:
            self._do(transfer, transfer.on_batch_ended(event))

    def _lose(self, session: Session, reason: str) -> None:
        self.counters.peers_lost += 1
        log_event(log, "decode node lost", logging.WARNING, peer=session.name, reason=reason)
        self._close(session, Failure(FailureCode.STALE_PEER, f"session lost: {reason}"[:1000]))

    def _close(self, session: Session, failure: Failure) -> None:
        """Stop its transfers, then close its endpoint: the batches end with the next events, and release the pages."""
        for transfer in [t for t in self._transfers.values() if t.key.instance == session.instance]:
            self._do(transfer, transfer.stop(failure))
        self._sessions.close(session)

    def _do(self, transfer: SenderTransfer, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Arm():
                    self._arming.arm(transfer, action)
                case StopPosting():
                    self._stop_posting(transfer, action)
                case ReportFinished():
                    self._report_finished(transfer, action)
                case ReportStopped():
                    self._report_stopped(transfer, action)
                case ReleaseSource():
                    self._release(transfer)

    def _arm(self, transfer: SenderTransfer, arm: Arm) -> None:
        session = self._sessions.get(transfer.key.instance)
        assert session is not None, "a live transfer has a session"
        if arm.threshold is None:
            handle = self.fabric.write(session.endpoint, arm.writes)
        else:
            handle = self.fabric.write_when(session.endpoint, self.word_address, arm.threshold, arm.writes)
        self._by_handle[handle] = _Armed(transfer.key, session.endpoint.id)
        transfer.on_armed(handle)

    def _stop_posting(self, transfer: SenderTransfer, action: StopPosting) -> None:
        self.engine.abort(engine_id(transfer.key))
        totals = [self.fabric.cancel(handle) for handle in action.handles]
        posted = sum(posted for posted, _ in totals)
        completed = sum(completed for _, completed in totals)
        self._do(transfer, transfer.on_cancelled(posted, completed))

    def _report_finished(self, transfer: SenderTransfer, report: ReportFinished) -> None:
        self.counters.finished += 1
        key, checksums = transfer.key, self._page_checksums(transfer) if self.checksums else None
        self._end(
            TransferFinished(
                instance=self.instance, key=key, posted=report.posted, times=report.times, checksums=checksums
            )
        )
        log_event(log, "transfer finished", request=key.request, attempt=key.attempt, posted=report.posted)

    def _report_stopped(self, transfer: SenderTransfer, report: ReportStopped) -> None:
        self.counters.stopped += 1
        key, failure, posted, completed = transfer.key, report.failure, report.posted, report.completed
        self._end(Stopped(instance=self.instance, key=key, posted=posted, completed=completed, failure=failure))
        reason = failure.message if failure else "aborted"
        log_event(log, "transfer stopped", request=key.request, posted=posted, completed=completed, reason=reason)

    def _end(self, message: Stopped | TransferFinished) -> None:
        self._ends[message.key] = message
        if len(self._ends) > REMEMBERED_ENDS:
            self._ends.popitem(last=False)
        self.send(message.key.instance, message)

    def _release(self, transfer: SenderTransfer) -> None:
        self.engine.release(engine_id(transfer.key))
        del self._transfers[transfer.key]
        del self._by_request[engine_id(transfer.key)]
        if not self._transfers:
            self._idle.set()

    def _page_checksums(self, transfer: SenderTransfer) -> bytes:
        pages = range(transfer.plan.ticket.first_page, transfer.plan.total_pages)
        blocks = [transfer.blocks[page] for page in pages]
        return page_checksums(self.region.address, self.layout, blocks)


def engine_id(key: TransferKey) -> str:
    """The name of a transfer's prompt in the prefill engine."""
    return f"{key.request}#{key.attempt}@{key.instance}"
