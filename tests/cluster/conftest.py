"""One cluster of one prefill and two decode nodes for the whole directory, healed before each test that may harm it."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch

from tests.cluster.harness import MODEL, ProcessCluster
from tests.cluster.oracle import Oracle, save_endless_model

STARTING_S = 300
"""For the test that comes first, and with it the cluster, on a machine with much else to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(STARTING_S))


@pytest.fixture(scope="session")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_endless_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="session")
def oracle(endless_model: Path) -> Oracle:
    return Oracle(endless_model)


@pytest.fixture(scope="package")
def standing(endless_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    cluster = ProcessCluster(endless_model, tmp_path_factory.mktemp("run"))
    try:
        cluster.start(prefill=1, decode=2)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def cluster(standing: ProcessCluster) -> ProcessCluster:
    """Healed for each test."""
    standing.heal()
    return standing


@pytest.fixture(scope="module")
def unharmed(standing: ProcessCluster) -> ProcessCluster:
    """For modules whose tests take nothing away: healed once."""
    standing.heal()
    return standing


@pytest.fixture
def client(unharmed: ProcessCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{unharmed.url}/v1", api_key="unused", timeout=60, max_retries=0) as client:
        yield client
