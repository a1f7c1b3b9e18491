"""What the nodes' tests share: the tiny model, its oracle, and the fabrics to run over."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fabric.libfabric import open_engine
from fabric.simulated import Faults, SimulatedEngine, SimulatedNetwork
from protocol import channel, router_link
from tests.nodes.pair import OpenFabric
from tests.oracle import Oracle
from tests.tiny_model import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="package", autouse=True)
def quick_heartbeats() -> Iterator[None]:
    """Most waits here end with a NodeStatus: five times as many. The patience with a silent router stays the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "TICK_S", channel.TICK_S / 5)
        patch.setattr(router_link, "MISSED_ACKS", router_link.MISSED_ACKS * 5)
        yield


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


def open_named(fabric: str, seed: int = 0) -> OpenFabric:
    """`reordering` is one simulated network for all that this function opens."""
    if fabric != "reordering":
        return lambda _: open_engine(fabric)
    faults = Faults(reorder=True, max_delay=40, busy_share=0.1, busy_burst=3)
    network = SimulatedNetwork(seed, faults)
    return lambda name: SimulatedEngine(network, name)


@pytest.fixture(params=["net", "tcp;ofi_rxm", "same-host", "reordering"])
def open_fabric(request: pytest.FixtureRequest, seed: int) -> OpenFabric:
    return open_named(request.param, seed)
