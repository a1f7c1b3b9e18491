"""One model folder and one key for all; a router and an answering node for each test that asks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.curve import ClusterKey, new_cluster_key
from tests.router.fake_node import FakeNode, answer
from tests.router.model_folder import END, write_model_folder
from tests.router.running_router import RunningRouter

REPLY = "Hello wörld 🙂!"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def key() -> ClusterKey:
    return new_cluster_key()


@pytest.fixture
def router(model_folder: Path, key: ClusterKey) -> Iterator[RunningRouter]:
    with RunningRouter(model_folder, key) as running:
        yield running


@pytest.fixture
def node(router: RunningRouter) -> FakeNode:
    """Answers every request with REPLY."""
    return router.node(answer(router.tokenizer.encode(REPLY), end_token(router)))


def end_token(router: RunningRouter) -> int:
    return router.tokenizer.encode(END)[0]
