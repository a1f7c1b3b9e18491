"""Ranks that die or hang in the middle of a forward, with real models. Each starts processes."""

import os
import signal
import threading
from contextlib import closing
from pathlib import Path

import pytest

from engine.errors import DeviceLost
from engine.loop import EngineLoop
from engine.options import EngineOptions
from engine.workers.build import build_parallel
from tests.engine.driving import greedy_request
from tests.engine.fake_workers import DEADLINE_S, Stepped, children, wait_until_gone, workers_but
from tests.engine.lively import LIVELY
from tests.engine.tiny_models import prompt_of

pytestmark = pytest.mark.slow
SILENCE_S = 1.0


def test_a_rank_that_hangs_ends_the_engine(tiny_llama: Path) -> None:
    before = children()
    (engine,) = build_parallel(EngineOptions(tiny_llama, LIVELY, threads=1, tp=2), head=True, silence_s=SILENCE_S)
    with closing(engine):
        worker = workers_but(before)["engine 0 rank 1"]
        os.kill(worker, signal.SIGSTOP)
        engine.add(greedy_request("x", prompt_of(10), 3))
        with pytest.raises(DeviceLost, match="rank 0 waited for the others in vain"):
            engine.step()
        wait_until_gone(worker)


def test_an_idle_engine_ends_with_any_of_its_workers(tiny_llama: Path) -> None:
    before, ended = children(), threading.Event()
    local, remote = build_parallel(EngineOptions(tiny_llama, LIVELY, threads=1, tp=2), head=True, engines=2)
    with closing(local), closing(remote):
        workers = workers_but(before)
        victim = workers["engine 1 rank 1"]
        loop = EngineLoop(remote, on_step=lambda _: None, on_end=ended.set)
        loop.start()
        os.kill(victim, signal.SIGKILL)
        assert ended.wait(DEADLINE_S), "the loop goes on with half an engine"
        assert isinstance(loop.error, DeviceLost)
        assert str(loop.error) == f"engine 1 rank 1 (process {victim}) was killed by SIGKILL"
        wait_until_gone(workers["engine 1 rank 0"])


def test_of_four_ranks_the_one_that_was_killed_is_named(tiny_llama: Path) -> None:
    before = children()
    (engine,) = build_parallel(EngineOptions(tiny_llama, LIVELY, threads=1, tp=4), head=True)
    with closing(engine):
        workers = workers_but(before)
        victim = workers["engine 0 rank 2"]
        os.kill(victim, signal.SIGSTOP)
        engine.add(greedy_request("x", prompt_of(10), 3))
        step = Stepped(engine)
        step.start()
        os.kill(victim, signal.SIGKILL)
        assert step.ended() == f"engine 0 rank 2 (process {victim}) was killed by SIGKILL"
        for pid in workers.values():
            wait_until_gone(pid)
