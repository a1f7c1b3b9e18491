"""The mutants, eight of the reliability matrix and four of rails that fail: each breaks one rule, in the classes that
real nodes run.

A mutant is a list of (class, attribute, replacement); `planted` puts it in place for a while.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import zmq
from msgspec.structs import replace

from decode_node.admission import Admission
from decode_node.job import Job, JobState
from fabric.api import RailInDoubt
from kv_messenger.attempts import Attempt, Attempts
from kv_messenger.fencing import Fencing
from kv_messenger.lost_rails import LostRails
from kv_messenger.peers import Peer
from kv_messenger.receiver import Receiver
from kv_messenger.receiver_transfer import Action, Outcome, ReceiverTransfer
from kv_messenger.sender_transfer import Action as SenderAction
from kv_messenger.sender_transfer import ReleaseSource, SenderTransfer
from protocol.channel import ControlThread, Link
from protocol.messages import Failure, FailureCode, RailFenced, RailLost, Stopped, WritesInDoubt
from protocol.ticket import TransferKey

Patch = tuple[type, str, Any]

_on_tick = ReceiverTransfer.on_tick
_on_finished = ReceiverTransfer.on_finished
_on_cancelled = SenderTransfer.on_cancelled
_receive_stopped = Receiver.on_stopped
_account_closed = Receiver._account_closed
_on_doubt = LostRails.on_doubt
_fence_rails = Fencing.fence_rails


def _free_when_late(self: ReceiverTransfer, now: float) -> list[Action]:
    """Nobody has written for so long: nobody will."""
    actions = _on_tick(self, now)
    return actions + self._close() if actions else actions


def _forget_to_tell(self: Receiver, attempt: Attempt) -> None:
    """The books are closed, but the engine does not hear that the pages of a failed transfer are safe."""
    if attempt.transfer.decided is not None and attempt.transfer.decided.outcome is Outcome.ARRIVED:
        _account_closed(self, attempt)
    elif attempt.expectation is not None:
        self.fabric.forget(attempt.expectation)
        self._slots.give_back(attempt.immediate)


def _finished_is_arrived(self: ReceiverTransfer, now: float, posted: int, checksums: bytes | None) -> list[Action]:
    """All writes completed for their sender: they will have landed."""
    actions = _on_finished(self, now, posted, checksums)
    return actions + self._decide(Outcome.ARRIVED, None) + self._close()


def _same_request(self: Attempts, instance: str, key: TransferKey) -> Attempt | None:
    """Whoever speaks of a request speaks of its latest attempt."""
    found = [attempt for attempt in self.all() if attempt.fetch.key.request == key.request]
    return found[-1] if found else None


def _whichever_attempt(self: Admission, key: TransferKey) -> Job | None:
    """Whatever is said of an attempt is said of the request."""
    job = self._jobs.get(key.request)
    return job if job is not None and job.state is JobState.WAITING_FOR_KV else None


def _fence_in_name(self: Fencing, landing: Any, failure: Failure) -> None:
    """The landing stays open, but is treated as if it were closed."""
    self._counters.fences += 1
    for attempt in self._attempts.of_landing(landing):
        self._do(attempt, attempt.transfer.on_fenced(failure))


def _keep_the_source(self: SenderTransfer, posted: int, completed: int) -> list[SenderAction]:
    """A transfer that was aborted is reported, and its pages are forgotten."""
    actions = _on_cancelled(self, posted, completed)
    return [action for action in actions if not isinstance(action, ReleaseSource)]


def _mistakes_count(self: Receiver, stopped: Stopped) -> None:
    """A node that does not serve a request is a bad node, whosever the mistake was."""
    _receive_stopped(self, stopped)
    peer, failure = self._peers.get(stopped.instance), stopped.failure
    if peer is not None and failure is not None and failure.code in (FailureCode.INVALID, FailureCode.TOO_LONG):
        self._fencing.lose(peer, failure.message)


def _wait_for_room(self: ControlThread, link: Link, message: Any, to: bytes = b"") -> bool:
    """It waits for room in the peer's queue, however long that takes."""
    frame = self._frame(message)
    try:
        link.socket.send_multipart([to, frame] if link.bound else [frame], 0)
    except zmq.ZMQError:  # nobody is there
        return False
    return True


def _repeat_at_once(self: LostRails, doubt: RailInDoubt) -> None:
    """What is in doubt is written again, without waiting for the fence of the rail that it may still land by."""
    _on_doubt(self, doubt)
    session = self._sessions.of_endpoint(doubt.endpoint)
    if session is not None:
        self._fabric.settle_rail(session.endpoint, doubt.rail, doubt.completed)


def _keep_the_count(self: Fencing, peer: Peer, lost: RailLost, now: float) -> RailFenced | None:
    """All that was counted by way of the rail counts on, as if it had all completed."""
    counted = [WritesInDoubt(immediate=doubt.immediate, completed=1 << 20) for doubt in lost.doubts]
    return _fence_rails(self, peer, replace(lost, doubts=counted), now)


def _rail_fence_in_name(self: Fencing, peer: Peer, lost: RailLost, now: float) -> RailFenced | None:
    """The rail's landing stays open, but the sender is told that it was closed."""
    again = [doubt.immediate for doubt in lost.doubts]
    return RailFenced(instance=self._peers.instance, landing=peer.number, rail=lost.rail, again=again)


def _repeat_all(self: Fencing, peer: Peer, lost: RailLost, now: float) -> RailFenced | None:
    """Everything in doubt is to come again, also what is whole or over."""
    fenced = _fence_rails(self, peer, lost, now)
    return fenced and replace(fenced, again=[doubt.immediate for doubt in lost.doubts])


MUTANTS: dict[str, Sequence[Patch]] = {
    "free on time-out": [(ReceiverTransfer, "on_tick", _free_when_late)],
    "drop an acknowledgement": [(Receiver, "_account_closed", _forget_to_tell)],
    "accept a short count": [(ReceiverTransfer, "on_finished", _finished_is_arrived)],
    "key by request id only": [
        (Attempts, "asked_of", _same_request),
        (Admission, "_current", _whichever_attempt),
    ],
    "skip the fence": [(Fencing, "_fence", _fence_in_name)],
    "leak on the abort path": [(SenderTransfer, "on_cancelled", _keep_the_source)],
    "count 4xx in the breaker": [(Receiver, "on_stopped", _mistakes_count)],
    "blocking send": [(ControlThread, "send_now", _wait_for_room)],
    "repeat before the rail is fenced": [(LostRails, "on_doubt", _repeat_at_once)],
    "keep the count of a lost rail": [(Fencing, "fence_rails", _keep_the_count)],
    "fence a rail in name": [(Fencing, "fence_rails", _rail_fence_in_name)],
    "repeat what is whole": [(Fencing, "fence_rails", _repeat_all)],
}


@contextmanager
def planted(patches: Sequence[Patch]) -> Iterator[None]:
    kept: list[tuple[type, str, Callable[..., Any]]] = [(of, name, of.__dict__[name]) for of, name, _ in patches]
    for of, name, replacement in patches:
        setattr(of, name, replacement)
    try:
        yield
    finally:
        for of, name, original in kept:
            setattr(of, name, original)
