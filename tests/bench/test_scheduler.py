"""The scheduler's benchmark times full batches of decodes, and nothing else."""

import pytest

from bench.null_device import CONTEXT, PAGE_SIZE, null_engine, prompt, sampling
from bench.scheduler import ADMITTED, BATCHES, KvferrySteps, admission_rows, decode_rows, table
from bench.scheduler_peer import TransformersSteps
from engine.config import SchedulerType
from engine.request import Request


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_every_step_decodes_the_whole_batch(scheduler: SchedulerType) -> None:
    steps = KvferrySteps(8, scheduler, new_tokens=100)
    assert all(steps.step() > 0 for _ in range(5))


def test_engines_take_turns_and_each_has_a_row() -> None:
    rows = decode_rows(2, 3, TransformersSteps)
    assert [(row.batch, row.implementation, row.scheduler) for row in rows] == [
        (2, "kvferry", "fifo"),
        (2, "kvferry", "prefill_first"),
        (2, "transformers", "fifo"),
        (2, "yardstick", "-"),
    ]
    assert all(0 < row.min_us <= row.p50_us <= row.p99_us for row in rows)


def test_prefix_sharing_is_on_and_its_work_is_in_the_steps() -> None:
    engine = null_engine(1, "fifo", new_tokens=2 * PAGE_SIZE)
    engine.add(Request("r", prompt(CONTEXT, 0), sampling(2 * PAGE_SIZE)))
    while engine.has_work:
        engine.step()
    assert engine.pages_cached == CONTEXT // PAGE_SIZE + 1


def test_a_prompt_is_admitted_new_and_then_found() -> None:
    rows = admission_rows(page_size=64, repeats=2)
    assert [(row.page_size, row.cached) for row in rows] == [(64, False), (64, True)]
    assert str(ADMITTED) in table([], rows)


def test_the_issue_s_batches_are_measured() -> None:
    assert BATCHES == (8, 64, 256)
