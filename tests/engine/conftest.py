"""Models shared by the engine's tests."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

import pytest
import torch

from tests.engine.tiny_models import KINDS
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
