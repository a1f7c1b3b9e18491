"""Models shared by the engine's tests, and a manager over a scripted runner."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import cast

import pytest
import torch

from engine.manager import ContinuousBatchingManager
from tests.engine.managing import positions
from tests.engine.tiny_models import KINDS
from tests.engine.traces import Harness
from tests.tiny_model import save_weights

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_weights(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_kind(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model by its name in KINDS."""

    @cache
    def folder(name: str) -> Path:
        kind = KINDS[name]
        return save_weights(tmp_path_factory.mktemp("models") / name, kind.family, **kind.settings)

    return folder


@pytest.fixture(scope="session", params=KINDS)
def any_kind(request: pytest.FixtureRequest, tiny_kind: Callable[[str], Path]) -> Path:
    """Each of KINDS in turn."""
    return tiny_kind(cast(str, request.param))


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def harness(request: pytest.FixtureRequest) -> Harness:
    return Harness(emit=positions, asynchronous=request.param)


@pytest.fixture
def manager(harness: Harness) -> Iterator[ContinuousBatchingManager]:
    with ContinuousBatchingManager(harness.engine) as manager:
        yield manager
    assert not manager.alive
    harness.assert_at_rest()
