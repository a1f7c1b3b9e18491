"""Models shared by the engine's tests."""

from pathlib import Path

import pytest
import torch

from tests.tiny_model import save_weights

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_weights(tmp_path_factory.mktemp("models") / "tiny-llama")
