"""Models shared by the engine's tests."""

from pathlib import Path

import pytest
import torch

from tests.engine.tiny_models import save_tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")
