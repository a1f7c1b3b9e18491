"""The fabrics that the conformance suite runs over, each with both sides in this process."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from fabric.api import TransferEngine
from fabric.libfabric import open_engine
from fabric.limits import Limits
from fabric.rails import Rail
from fabric.simulated import Faults, SimulatedEngine, SimulatedNetwork
from tests.fabric.cut_rail import cut_connections
from tests.fabric.party import Party

SEED = 20261130


class Fabric:
    """Makes parties that reach each other, and closes them. A stalled party receives nothing until it resumes."""

    network: SimulatedNetwork | None = None

    def __init__(self, provider: str, rails: int = 1) -> None:
        self.provider = provider
        self.rails = rails
        self.parties: list[Party] = []

    def party(self, limits: Limits | None = None, rails: int | None = None) -> Party:
        """`rails`: None for the fabric's number."""
        self.parties.append(Party(self.engine(limits, rails or self.rails)))
        return self.parties[-1]

    def engine(self, limits: Limits | None, rails: int) -> TransferEngine:
        loopbacks = [Rail(f"127.0.0.{number + 1}") for number in range(rails)]
        return open_engine(self.provider, limits=limits, rails=loopbacks)

    def stall(self, party: Party) -> None:
        """Libfabric's tcp-like providers move bytes only while the receiver progresses: the test does not drive it."""

    def resume(self, party: Party) -> None:
        """The test drives it again."""

    def cut(self, party: Party, rail: int) -> None:
        """One of its rails breaks, with writes on their way: of all parties here, where rails are interfaces."""
        cut_connections(f"127.0.0.{rail + 1}")

    def close(self) -> None:
        for party in self.parties:
            party.engine.close()


class SimulatedFabric(Fabric):
    def __init__(self, faults: Faults, rails: int = 1) -> None:
        super().__init__("simulated", rails)
        self.network: SimulatedNetwork = SimulatedNetwork(SEED, faults)

    def engine(self, limits: Limits | None, rails: int) -> TransferEngine:
        return SimulatedEngine(self.network, limits=limits, rails=rails)

    def stall(self, party: Party) -> None:
        self.network.hold(self._engine(party))

    def resume(self, party: Party) -> None:
        self.network.release(self._engine(party))

    def cut(self, party: Party, rail: int) -> None:
        self.network.cut(self._engine(party), rail)

    @staticmethod
    def _engine(party: Party) -> SimulatedEngine:
        assert isinstance(party.engine, SimulatedEngine)
        return party.engine


REORDERING = Faults(reorder=True, max_delay=40, busy_share=0.1, busy_burst=3)
FABRICS: dict[str, Callable[[], Fabric]] = {
    "net": lambda: Fabric("net"),
    "tcp;ofi_rxm": lambda: Fabric("tcp;ofi_rxm"),
    "same-host": lambda: Fabric("same-host"),
    "simulated": lambda: SimulatedFabric(Faults()),
    "reordering": lambda: SimulatedFabric(REORDERING),
    "net, two rails": lambda: Fabric("net", rails=2),
    "reordering, three rails": lambda: SimulatedFabric(REORDERING, rails=3),
}


def each_of(fabrics: Mapping[str, Callable[[], Fabric]]) -> Any:
    """The fixture `fabric` of a module that runs over these."""

    @pytest.fixture(params=fabrics)
    def fabric(request: pytest.FixtureRequest) -> Iterator[Fabric]:
        opened = fabrics[request.param]()
        yield opened
        opened.close()

    return fabric


fabric = each_of(FABRICS)


@pytest.fixture(params=["net", "tcp;ofi_rxm"])
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["net", "tcp;ofi_rxm", "same-host"])
def way(request: pytest.FixtureRequest) -> str:
    """Libfabric's providers, and what two processes of one host have beside them."""
    return str(request.param)


class Link:
    """A sender connected to a receiver, whose memory it may write.."""

    def __init__(self, fabric: Fabric, size: int = 1 << 20, limits: Limits | None = None) -> None:
        self.fabric = fabric
        self.sender, self.receiver = fabric.party(limits), fabric.party()
        self.source, self.source_region = self.sender.memory(size)
        self.target, self.target_region = self.receiver.memory(size, fill=0)
        self.landing = self.receiver.engine.open_landing("sender")
        self.sending = self.sender.engine.connect("receiver", self.landing.address)

    @property
    def both(self) -> tuple[Party, Party]:
        return self.sender, self.receiver


@pytest.fixture
def link(fabric: Fabric) -> Link:
    return Link(fabric)
