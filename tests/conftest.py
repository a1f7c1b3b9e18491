"""What tests of several packages share."""

import os
import random
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from deploy.model import is_ready

MODEL = Path(__file__).resolve().parent.parent / ".kvferry" / "models" / "SmolLM2-135M-Instruct"
LONG = ("tests/simulation/", "tests/cluster/")
"""Run first: of tests side by side, what takes long must not be what is left in the end."""


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis, where it is installed, times no example: that would measure what else the machine does."""
    if config.pluginmanager.has_plugin("hypothesispytest"):
        from hypothesis import settings

        settings.register_profile("untimed", deadline=None)
        settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Asked by pytest-xdist (`-n 2`), which need not be there."""
    from tests.side_by_side import ByFile

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logs may be no Unicode; to reach another process (`-n 2`) it must be."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


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
