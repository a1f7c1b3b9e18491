"""Ranks that die or hang in the middle of a forward, with real models. Each starts processes."""

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from engine.errors import DeviceLost
from engine.options import EngineOptions
from engine.workers.build import build_parallel
from tests.engine.driving import greedy_request
from tests.engine.fake_workers import Stepped, wait_until_gone
from tests.engine.test_workers import LIVELY
from tests.engine.tiny_models import prompt_of

pytestmark = pytest.mark.slow
SILENCE_S = 1.0


def test_a_rank_that_hangs_ends_the_engine(tiny_llama: Path) -> None:
    (engine,) = build_parallel(EngineOptions(tiny_llama, LIVELY, threads=1, tp=2), head=True, silence_s=SILENCE_S)
    with closing(engine):
        (worker,) = engine.worker_pids
        os.kill(worker, signal.SIGSTOP)
        engine.add(greedy_request("x", prompt_of(10), 3))
        with pytest.raises(DeviceLost, match="rank 0 waited for the others in vain"):
            engine.step()
        wait_until_gone(worker)


def test_of_four_ranks_the_one_that_was_killed_is_named(tiny_llama: Path) -> None:
    (engine,) = build_parallel(EngineOptions(tiny_llama, LIVELY, threads=1, tp=4), head=True)
    with closing(engine):
        pids = engine.worker_pids
        os.kill(pids[1], signal.SIGSTOP)
        engine.add(greedy_request("x", prompt_of(10), 3))
        step = Stepped(engine)
        step.start()
        os.kill(pids[1], signal.SIGKILL)
        assert step.ended() == f"engine 0 rank 2 (process {pids[1]}) was killed by SIGKILL"
        for pid in pids:
            wait_until_gone(pid)
