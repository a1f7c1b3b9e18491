"""What runs over an RDMA NIC, and is skipped where there is none. `make test-rdma` runs it alone.

Both sides are in this machine and use one NIC: what they write goes through it all the same.
"""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import pytest

from fabric.api import TransferEngine
from fabric.errors import FabricUnavailable
from fabric.libfabric import NIC_PROVIDERS, open_engine, providers
from fabric.limits import Limits
from tests.fabric.conftest import Fabric, Link
from tests.fabric.party import Party


@dataclass(frozen=True)
class Nic:
    """`node`: the address that is bound to."""

    provider: str
    node: str


@cache
def found_nic() -> Nic | None:
    """The first provider of NICs that serves any of this machine's addresses."""
    addresses = [a.address for every in psutil.net_if_addrs().values() for a in every if a.family == socket.AF_INET]
    for node in addresses:
        for provider in NIC_PROVIDERS:
            if provider in providers(node):
                return Nic(provider, node)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.rdma)


@pytest.fixture
def nic() -> Nic:
    try:
        found = found_nic()
    except FabricUnavailable as error:
        pytest.skip(str(error))
    if found is None:
        pytest.skip(f"no RDMA NIC: none of {', '.join(NIC_PROVIDERS)} serves an address of this machine")
    return found


class NicFabric(Fabric):
    def __init__(self, nic: Nic) -> None:
        super().__init__(nic.provider)
        self._node = nic.node

    def engine(self, limits: Limits | None, rails: int) -> TransferEngine:
        if rails > 1:
            pytest.skip("one NIC is one rail")
        return open_engine(self.provider, self._node, limits)

    def stall(self, party: Party) -> None:
        pytest.skip("a NIC receives whatever its host does")


@pytest.fixture
def fabric(nic: Nic) -> Iterator[Fabric]:
    opened = NicFabric(nic)
    yield opened
    opened.close()


@pytest.fixture
def link(fabric: Fabric) -> Link:
    return Link(fabric)
