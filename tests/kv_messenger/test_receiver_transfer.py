"""The decode side's state machine: one outcome, and pages that are safe only when nobody can write."""

import pytest

from kv_messenger.receiver_transfer import (
    SETTLE_DEADLINE_S,
    STOP_DEADLINE_S,
    AccountClosed,
    Action,
    AskToStop,
    Decided,
    NeedFence,
    Outcome,
    ReceiverTransfer,
    Revise,
)
from protocol.messages import Failure, FailureCode
from tests.kv_messenger.builders import KEY

GONE = Failure(FailureCode.NODE_LOST, "gone")


def transfer(verified: bool = False) -> ReceiverTransfer:
    return ReceiverTransfer(KEY, deadline=100.0, verified=verified, expected=10)


def outcomes(actions: list[Action]) -> list[Outcome]:
    return [action.outcome for action in actions if isinstance(action, Decided)]


def closes(actions: list[Action]) -> bool:
    return AccountClosed() in actions


def test_all_writes_counted_decides_and_closes() -> None:
    actions = transfer().on_arrived(10)
    assert outcomes(actions) == [Outcome.ARRIVED] and closes(actions)


def test_what_comes_after_the_arrival_changes_nothing() -> None:
    done = transfer()
    done.on_arrived(10)
    assert done.on_finished(1.0, 10, None) == []
    assert done.on_stopped(1.0, 10, GONE) == []
    assert done.abort(1.0, None) == []
    assert done.on_peer_lost(GONE) == []
    assert done.on_fenced(GONE) == []
    assert done.on_tick(1000.0) == []


def test_a_count_that_was_not_asked_for_is_not_an_arrival() -> None:
    assert transfer().on_arrived(9) == []


def test_an_abort_asks_the_sender_to_stop_and_keeps_the_pages() -> None:
    aborted = transfer()
    actions = aborted.abort(1.0, None)
    assert outcomes(actions) == [Outcome.CANCELLED] and AskToStop() in actions and not closes(actions)
    assert aborted.on_stopped(1.5, 4, None) == [Revise(4)]
    assert closes(aborted.on_arrived(4))


def test_an_arrival_after_the_abort_closes_without_a_second_outcome() -> None:
    aborted = transfer()
    aborted.abort(1.0, None)
    assert aborted.on_arrived(10) == [AccountClosed()]


def test_stopped_may_overtake_its_own_writes_but_never_frees_the_pages_alone() -> None:
    failed = transfer()
    actions = failed.on_stopped(1.0, 3, GONE)
    assert outcomes(actions) == [Outcome.FAILED] and Revise(3) in actions and not closes(actions)


def test_writes_that_never_land_need_a_fence_not_a_timer() -> None:
    failed = transfer()
    failed.on_stopped(1.0, 3, GONE)
    assert failed.on_tick(1.0 + SETTLE_DEADLINE_S - 0.01) == []
    actions = failed.on_tick(1.0 + SETTLE_DEADLINE_S)
    assert any(isinstance(action, NeedFence) for action in actions) and not closes(actions)
    assert failed.on_tick(10_000.0) == [] and not failed.closed
    assert closes(failed.on_fenced(GONE))


def test_a_sender_that_does_not_answer_the_abort_is_fenced() -> None:
    aborted = transfer()
    aborted.abort(1.0, None)
    actions = aborted.on_tick(1.0 + STOP_DEADLINE_S)
    assert any(isinstance(action, NeedFence) for action in actions) and not closes(actions)


def test_a_lost_peer_fails_the_request_at_once_and_the_pages_wait_for_the_fence() -> None:
    lost = transfer()
    actions = lost.on_peer_lost(GONE)
    assert outcomes(actions) == [Outcome.FAILED] and not closes(actions)
    assert lost.on_fenced(GONE) == [AccountClosed()]


def test_a_refusal_means_nothing_was_written() -> None:
    actions = transfer().on_refused(Failure(FailureCode.OVERLOADED, "full"))
    assert outcomes(actions) == [Outcome.FAILED] and closes(actions)


def test_too_many_writes_fail_closed() -> None:
    actions = transfer().on_over_counted(11)
    assert outcomes(actions) == [Outcome.FAILED] and not closes(actions)
    assert any(isinstance(action, NeedFence) for action in actions)


@pytest.mark.parametrize("posted", [0, 9, 11])
def test_a_sender_that_finished_with_another_count_fails_the_transfer(posted: int) -> None:
    actions = transfer().on_finished(1.0, posted, None)
    assert outcomes(actions) == [Outcome.FAILED] and Revise(posted) in actions


def test_finished_but_short_is_never_rounded_up() -> None:
    short = transfer()
    assert short.on_finished(1.0, 10, None) == []
    actions = short.on_tick(1.0 + SETTLE_DEADLINE_S)
    assert outcomes(actions) == [Outcome.FAILED] and any(isinstance(a, NeedFence) for a in actions)


def test_the_deadline_stops_the_sender() -> None:
    late = transfer()
    assert late.on_tick(99.9) == []
    actions = late.on_tick(100.0)
    assert outcomes(actions) == [Outcome.FAILED] and AskToStop() in actions and not closes(actions)


def test_in_debug_mode_arrival_waits_for_the_checksums() -> None:
    verified = transfer(verified=True)
    assert verified.on_arrived(10) == []
    actions = verified.on_finished(1.0, 10, b"sums")
    assert outcomes(actions) == [Outcome.ARRIVED] and verified.checksums == b"sums"
    assert actions[-1] == AccountClosed(), "its pages may go to others once they were compared, not before"


def test_in_debug_mode_one_that_is_cancelled_before_its_checksums_closes_with_the_senders_last_word() -> None:
    finishing, stopping = (transfer(verified=True) for _ in range(2))
    for cancelled in (finishing, stopping):
        cancelled.on_arrived(10)
        actions = cancelled.abort(1.0, None)
        assert outcomes(actions) == [Outcome.CANCELLED] and AskToStop() in actions and not closes(actions)
    assert finishing.on_finished(2.0, 10, b"sums") == [AccountClosed()]
    assert stopping.on_stopped(2.0, 10, None) == [Revise(10)]
    assert stopping.on_arrived(10) == [AccountClosed()]


def test_in_debug_mode_a_sender_lost_before_its_checksums_fails_the_transfer() -> None:
    verified = transfer(verified=True)
    verified.on_arrived(10)
    assert outcomes(verified.on_peer_lost(GONE)) == [Outcome.FAILED]
    late = transfer(verified=True)
    late.on_arrived(10)
    assert outcomes(late.on_tick(100.0)) == [Outcome.FAILED]
