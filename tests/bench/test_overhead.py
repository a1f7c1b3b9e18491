"""What a step adds to its forward is what its parts add up to."""

from pathlib import Path

import pytest

from bench.overhead import BATCH, Step, measure_overhead, summary, table
from tests.tiny_model import save_tiny_model


def test_the_overhead_is_a_share_of_the_forward_paired_by_step() -> None:
    steps = [Step(1_050, 1_000, 20, 20, 10), Step(2_100, 2_000, 40, 40, 20), Step(4_400, 4_000, 200, 100, 100)]
    one = summary(steps)
    assert one.overhead == pytest.approx(0.05)
    assert (one.total_us, one.device_us) == (2.1, 2.0)
    assert "5.0% more" in table(one)


def test_a_run_on_a_model_accounts_for_its_steps(tmp_path: Path) -> None:
    one = measure_overhead(save_tiny_model(tmp_path), threads=1, seed=0, steps=3, tokens=range(5, 80))
    assert one.batch == BATCH
    assert one.total_us > one.device_us > 0
    assert one.schedule_us > 0 and one.launch_us > 0 and one.update_us > 0
