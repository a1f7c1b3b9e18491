"""The prefill side's state machine: source pages are released once, after the last write ended."""

from fabric.api import WritesEnded
from fabric.errors import OperationError
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
from protocol.messages import Failure, FailureCode
from tests.kv_messenger.builders import KEY, layout, plan

BROKEN = OperationError("fi_writedata", 5, "broken", "", "decode-0")
ABORTED: Failure | None = None
LOST = Failure(FailureCode.STALE_PEER, "session lost")


def ended(handle: int, posted: int = 2, error: OperationError | None = None, at_ns: int = 50) -> WritesEnded:
    completed = posted if error is None else posted - 1
    return WritesEnded(handle, posted, completed, posted * 64, False, error, at_ns, at_ns, at_ns + 1)


def started(tokens: int = 8, chunks: int = 1) -> tuple[SenderTransfer, list[int]]:
    """A transfer of two layers whose chunks were all announced and armed, as handles 0, 1, ..."""
    transfer = SenderTransfer(KEY, plan(layout(layers=2), tokens, range(tokens // 4)), received_ns=10, deadline=9.0)
    size = tokens // chunks
    handles: list[int] = []
    for start in range(0, tokens, size):
        for action in transfer.on_chunk(Chunk(start, start + size, [range(tokens // 4)], 1 + start)):
            assert isinstance(action, Arm)
            handles.append(len(handles))
            transfer.on_armed(handles[-1])
    return transfer, handles


def kinds(actions: list[Action]) -> list[type]:
    return [type(action) for action in actions]


def test_it_finishes_when_every_write_and_the_forward_have_ended() -> None:
    transfer, (first, second) = started()
    assert transfer.on_batch_ended(ended(first)) == []
    assert transfer.on_batch_ended(ended(second)) == []
    report, release = transfer.on_forward_ended(20, 100)
    assert isinstance(report, ReportFinished) and report.posted == 4 and isinstance(release, ReleaseSource)


def test_the_forward_of_an_earlier_chunk_does_not_finish_it() -> None:
    transfer, handles = started(tokens=8, chunks=2)
    transfer.on_forward_ended(20, 30)
    for handle in handles:
        assert transfer.on_batch_ended(ended(handle, posted=1)) == []
    assert kinds(transfer.on_forward_ended(30, 40)) == [ReportFinished, ReleaseSource]


def test_batches_that_a_gate_withholds_keep_it_open() -> None:
    transfer = SenderTransfer(KEY, plan(layout(layers=2), 8, [0, 1]), 0, 9.0)
    transfer.on_chunk(Chunk(0, 8, [[0, 1]], 1))
    transfer.on_armed(0)
    transfer.on_batch_ended(ended(0))
    assert transfer.on_forward_ended(20, 100) == []


def test_times_count_the_writes_posted_before_the_last_forward_ended() -> None:
    transfer, (first, second) = started()
    transfer.on_batch_ended(ended(first, at_ns=90))
    transfer.on_forward_ended(started_ns=20, ended_ns=100)
    (report, _) = transfer.on_batch_ended(ended(second, at_ns=101))
    assert isinstance(report, ReportFinished)
    times = report.times
    assert (times.early_writes, times.last_chunk_writes, times.chunks) == (2, 4, 1)
    assert (times.queue_s, times.prefill_s) == (10 / 1e9, 80 / 1e9)


def test_an_abort_cancels_reports_the_posted_and_releases_after_the_last_batch() -> None:
    transfer, handles = started()
    assert transfer.stop(ABORTED) == [StopPosting(tuple(handles))]
    assert transfer.on_cancelled(posted=3, completed=1) == [ReportStopped(3, 1, None)]
    assert transfer.on_batch_ended(ended(handles[0], posted=2)) == []
    assert transfer.on_batch_ended(ended(handles[1], posted=1)) == [ReleaseSource()]


def test_an_abort_before_the_first_chunk_releases_at_once() -> None:
    transfer = SenderTransfer(KEY, plan(layout(), 8, [0, 1]), 0, 9.0)
    assert transfer.stop(ABORTED) == [StopPosting(())]
    assert transfer.on_cancelled(0, 0) == [ReportStopped(0, 0, None), ReleaseSource()]
    assert transfer.on_chunk(Chunk(0, 8, [[0, 1]], 1)) == []


def test_a_failed_write_stops_the_others_and_counts_what_was_posted_before() -> None:
    transfer, (first, second) = started()
    assert transfer.on_batch_ended(ended(first, posted=2, error=BROKEN)) == []
    assert transfer.stop(LOST) == [StopPosting((second,))]
    assert transfer.on_cancelled(posted=1, completed=0) == [ReportStopped(3, 1, LOST)]
    assert transfer.on_batch_ended(ended(second, posted=1)) == [ReleaseSource()]


def test_a_transfer_with_a_failed_write_never_looks_finished() -> None:
    transfer, (first, second) = started()
    transfer.on_forward_ended(20, 100)
    transfer.on_batch_ended(ended(first))
    assert transfer.on_batch_ended(ended(second, error=BROKEN)) == []
    assert transfer.stop(LOST) == [StopPosting(())]
    assert kinds(transfer.on_cancelled(0, 0)) == [ReportStopped, ReleaseSource]


def test_stopping_twice_or_after_the_end_is_a_no_op() -> None:
    transfer, handles = started()
    transfer.stop(ABORTED)
    transfer.on_cancelled(0, 0)
    assert transfer.stop(ABORTED) == []
    done, handles = started()
    for handle in handles:
        done.on_batch_ended(ended(handle))
    done.on_forward_ended(1, 2)
    assert done.stop(ABORTED) == []
