"""What tests of several packages share."""

import os
import random
from pathlib import Path

import pytest

from deploy.model import is_ready

MODEL = Path(__file__).resolve().parent.parent / ".kvferry" / "models" / "SmolLM2-135M-Instruct"


@pytest.fixture
def seed() -> int:
    """Another one each run, shown where the test fails; KVFERRY_SEED repeats it."""
    value = int(os.environ.get("KVFERRY_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"KVFERRY_SEED={value}")  # noqa: T201 - pytest shows it with a failure
    return value


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The converted demo model. Mark tests that use it with `model`."""
    if not is_ready(MODEL):
        pytest.fail(f"{MODEL} is missing or of an older format: run `make setup`")
    return MODEL
