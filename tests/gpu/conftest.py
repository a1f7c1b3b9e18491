"""What runs on a CUDA device, and is skipped where there is none. `make test-gpu` runs it alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cuda import installed_kernels
from engine.cuda_driver import CudaDriver, installed_driver
from engine.errors import NoDevice
from tests.engine import fake_flashinfer
from tests.tiny_model import save_weights

COMPILING_S = 400
"""FlashInfer compiles its kernels when they are first asked for."""
WARN = pytest.mark.filterwarnings("default")
"""Of other people's code on devices that we do not have at hand, a warning is not our error."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(WARN)
            item.add_marker(pytest.mark.timeout(COMPILING_S))


@pytest.fixture(autouse=True)
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


@pytest.fixture
def driver() -> CudaDriver:
    try:
        return installed_driver()
    except NoDevice as error:
        pytest.skip(str(error))


@pytest.fixture
def flashinfer() -> Any:
    kernels = installed_kernels()
    if kernels is None:
        pytest.skip("flashinfer is not installed")
    return kernels


@pytest.fixture(params=["stand-in", "flashinfer"])
def kernels(request: pytest.FixtureRequest) -> Any:
    """FlashInfer's wrappers, and those in plain torch that take their place: the rest does not depend on the former."""
    return fake_flashinfer if request.param == "stand-in" else request.getfixturevalue("flashinfer")


@pytest.fixture(scope="session")
def llama_64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads that FlashInfer has kernels for."""
    return save_weights(tmp_path_factory.mktemp("models") / "llama", head_dim=64)


@pytest.fixture(scope="session")
def gemma_64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hybrid, with softcaps."""
    return save_weights(tmp_path_factory.mktemp("models") / "gemma2", "gemma2", head_dim=64)
