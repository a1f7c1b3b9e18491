"""Records between two processes: whole, of known kinds, bounded, with file descriptors."""

import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from engine.forward_batch import PLACEHOLDER, BatchRow, ForwardBatch, SampleStream
from engine.runner import SampledToken
from engine.workers.channel import MAX_RECORD_BYTES, Channel
from engine.workers.messages import Answer, Done, Failed, Forward, Order, Row, Serve, Stop, as_batch, as_forward
from protocol.sampling import SamplingParams

Ends = tuple[Channel[Answer], Channel[Order], socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The main process's end, the worker's, and the main process's as a plain socket."""
    ours, theirs = socket.socketpair()
    with Channel[Answer](ours, Answer) as main, Channel[Order](theirs, Order) as worker:
        yield main, worker, ours


def test_records_arrive_as_they_were_sent_in_order(ends: Ends) -> None:
    main, worker, _ = ends
    large = Forward([Row(0, list(range(100_000)), [list(range(2000))], True, -1)], [])

    def send_both() -> None:
        main.send(large)
        main.send(Stop())

    sender = threading.Thread(target=send_both)
    sender.start()
    assert worker.receive() == large
    assert worker.receive() == Stop()
    sender.join()
    done = Done([SampledToken(7, -0.25), "not finite", SampledToken(8)], 1, 2)
    worker.send(done)
    assert main.receive() == done


def test_a_descriptor_comes_with_its_record(ends: Ends) -> None:
    main, worker, _ = ends
    reading, writing = os.pipe()
    main.send(Serve(16, 8), [writing])
    os.close(writing)
    order, fds = worker.receive_with_fds()
    assert order == Serve(16, 8)
    os.write(fds[0], b"here")
    os.close(fds[0])
    assert os.read(reading, 10) == b"here"
    os.close(reading)


def test_the_other_sides_end_is_the_end(ends: Ends) -> None:
    main, worker, _ = ends
    worker.close()
    with pytest.raises(EOFError):
        main.receive()
    with pytest.raises(EOFError):
        main.send(Stop())


@pytest.mark.parametrize("frame", [struct.pack("<I", MAX_RECORD_BYTES + 1), struct.pack("<I", 1) + b"\xc1"])
def test_what_is_no_record_is_refused(ends: Ends, frame: bytes) -> None:
    _, worker, raw = ends
    raw.sendall(frame)
    with pytest.raises(ValueError, match=r"limit|MessagePack|malformed|invalid"):
        worker.receive()


def test_an_answer_is_no_order(ends: Ends) -> None:
    main, worker, _ = ends
    main.send(Failed("because"))
    with pytest.raises(ValueError, match="Failed"):
        worker.receive()


def test_a_side_that_takes_nothing_is_given_up(ends: Ends) -> None:
    main, _, raw = ends
    raw.settimeout(0.05)
    with pytest.raises(TimeoutError):
        main.send(Failed("x" * (8 << 20)))


PENALISED = SamplingParams(max_new_tokens=5, temperature=0.5, repetition_penalty=1.5, logit_bias=((3, 1.0),))
ROWS = [
    BatchRow("A", 4, [5, 6], [[2, 3], [4]]),
    BatchRow("B", 9, [7], [[5], [6]], SampleStream(PENALISED, (1 << 63) - 1, [1, 2], 2)),
    BatchRow("C", 3, [PLACEHOLDER], [[8], [9]], SampleStream(SamplingParams(max_new_tokens=1), 5, [1, 2], 1), carry=0),
]


def test_a_batch_is_the_same_on_the_other_side_where_tokens_are_chosen(ends: Ends) -> None:
    main, worker, _ = ends
    main.send(as_forward(ForwardBatch(ROWS), chosen=True))
    received = worker.receive()
    assert isinstance(received, Forward)
    found = as_batch(received)
    for mine, sent in zip(found.rows, ROWS, strict=True):
        assert (mine.start, mine.end, mine.tokens, mine.tables) == (sent.start, sent.end, sent.tokens, sent.tables)
        assert mine.carry == sent.carry
    _, first, second = (row.sample for row in found.rows)
    assert found.rows[0].sample is None
    assert first == SampleStream(PENALISED, (1 << 63) - 1, [1, 2], 2)
    assert second == SampleStream(SamplingParams(max_new_tokens=1), 5, [], 1), "no token depends on the history"


def test_others_learn_only_that_a_token_is_wanted() -> None:
    forward = as_forward(ForwardBatch(ROWS), chosen=False)
    assert forward.streams == []
    assert [row.sample is not None for row in as_batch(forward).rows] == [False, True, True]
