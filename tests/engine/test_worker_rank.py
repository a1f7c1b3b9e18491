"""A worker's own part: it obeys, says why it cannot, and does not outlive the main process."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cache_pool import pool_bytes
from engine.forward_batch import SampleStream
from engine.models.loading import load_model
from engine.progress import ProgressWord
from engine.workers.channel import Channel
from engine.workers.memory import SharedMemory
from engine.workers.messages import (
    FAILED,
    WELL,
    Answer,
    Done,
    Failed,
    Forward,
    Load,
    Loaded,
    Order,
    Ready,
    Row,
    Serve,
    Stop,
)
from engine.workers.rank import serve
from protocol.sampling import SamplingParams
from tests.engine.fake_workers import DEADLINE_S, ROOT, wait_until_gone
from tests.engine.tiny_models import greedy, prompt_of

Ends = tuple[Channel[Answer], Channel[Order]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The main process's and the worker's."""
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE_S)
    with Channel[Answer](ours, Answer) as main, Channel[Order](theirs, Order) as worker:
        yield main, worker


def load(folder: Path, head: bool = True) -> Load:
    """All of a model, so that there is nobody to meet."""
    return Load(str(folder), "float32", head, rank=0, world=1, port=None, threads=1, silence_s=1.0)


def test_a_whole_model_is_served_from_first_to_last_word(ends: Ends, tiny_llama: Path) -> None:
    main, worker = ends
    geometry = load_model(tiny_llama).geometry(4)
    memory = SharedMemory.create(1, pool_bytes(geometry, 8))
    word, prompt = ProgressWord(memory.word()), prompt_of(9)
    greedily = SampleStream(SamplingParams(max_new_tokens=1), 0, [], 9)
    main.send(load(tiny_llama))
    main.send(Serve(4, 8), [memory.fd])
    main.send(Forward([Row(0, prompt[:5], [[2, 3]], False, -1)], []))
    main.send(Forward([Row(5, prompt[5:], [[2, 3, 4]], True, -1)], [greedily]))
    main.send(Stop())
    assert serve(worker) == WELL
    memory.close()
    assert [main.receive() for _ in range(2)] == [Loaded(), Ready()]
    first, second = main.receive(), main.receive()
    assert isinstance(first, Done) and first.tokens == []
    assert isinstance(second, Done)
    assert [sampled[0] for sampled in second.tokens] == greedy(tiny_llama, prompt, 1)
    assert word.value == 6


def test_a_model_that_is_refused_is_reported(ends: Ends, tmp_path: Path) -> None:
    main, worker = ends
    main.send(load(tmp_path))
    assert serve(worker) == FAILED
    answer = main.receive()
    assert isinstance(answer, Failed) and "config.json" in answer.reason


def test_words_out_of_turn_are_an_error(ends: Ends) -> None:
    main, worker = ends
    main.send(Stop())
    assert serve(worker) == FAILED
    assert main.receive() == Failed("ValueError: Stop came where Load was to come")


def test_a_forward_that_raises_is_the_last(ends: Ends, tiny_llama: Path) -> None:
    main, worker = ends
    geometry = load_model(tiny_llama).geometry(4)
    memory = SharedMemory.create(1, pool_bytes(geometry, 8))
    main.send(load(tiny_llama, head=False))
    main.send(Serve(4, 8), [memory.fd])
    main.send(Forward([Row(0, [5, 1 << 20], [[2]], False, -1)], []))
    assert serve(worker) == FAILED
    memory.close()
    answers = [main.receive() for _ in range(3)]
    assert isinstance(answers[-1], Failed) and "Error" in answers[-1].reason


def test_the_main_processs_end_is_the_end(ends: Ends) -> None:
    main, worker = ends
    main.close()
    assert serve(worker) == WELL


MAIN = """\
import sys
from engine.tensor_parallel import Shard
from engine.workers.process import spawn
worker = spawn("rank 1", Shard(1, 2), 1.0)
print(worker.pid, flush=True)
sys.stdin.read()
"""


def test_a_worker_dies_with_the_main_process_however_that_dies() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
    wait_until_gone(pid)
