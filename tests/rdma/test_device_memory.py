"""Pages in a GPU's memory, written by a NIC and read by it. Needs both."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from engine.cuda_driver import CudaDriver, installed_driver
from engine.cuda_memory import DeviceMemory, allocate, can_reach_nic
from engine.device_progress import DeviceProgressWord
from engine.errors import NoDevice
from fabric.api import Arrived, MemoryRegion, WritesEnded
from fabric.errors import FabricUnavailable
from fabric.immediates import pack
from fabric.libfabric import LibfabricEngine, open_engine
from tests.fabric.party import Party, drive, pages
from tests.rdma.conftest import Nic

PAGE = 64 << 10
COUNT = 64
LAYERS = 32


@pytest.fixture
def driver() -> CudaDriver:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    try:
        found = installed_driver()
    except NoDevice as error:
        pytest.skip(str(error))
    torch.cuda.init()  # type: ignore[no-untyped-call]
    if why := can_reach_nic(found, 0):
        pytest.skip(why)
    return found


class Side:
    """An engine, and pages of the device that it may read or write."""

    def __init__(self, nic: Nic, memory: DeviceMemory) -> None:
        self.engine: LibfabricEngine = open_engine(nic.provider, nic.node, device_memory=True)
        self.party = Party(self.engine)
        self.region: MemoryRegion = self.engine.register(memory.address, memory.size, memory.ordinal)
        self.bytes = memory.tensor().zero_()


@pytest.fixture
def sides(nic: Nic, driver: CudaDriver) -> Iterator[tuple[Side, Side]]:
    """A sender and a receiver."""
    with ExitStack() as opened:
        made = []
        for _ in range(2):
            memory = opened.enter_context(allocate(driver, 0, COUNT * PAGE))
            try:
                made.append(Side(nic, memory))
            except FabricUnavailable as error:
                pytest.skip(str(error))
            opened.callback(made[-1].engine.close)
        torch.cuda.synchronize()
        yield made[0], made[1]


def test_the_form_of_registration_is_known(
    sides: tuple[Side, Side], record_property: Callable[[str, object], None]
) -> None:
    """In the report: by dmabuf or by address."""
    record_property("dmabuf", sides[0].engine.is_dmabuf(sides[0].region))


def test_pages_go_from_a_gpus_memory_into_a_gpus_memory(sides: tuple[Side, Side]) -> None:
    sender, receiver = sides
    sender.bytes.copy_(torch.randint(0, 256, sender.bytes.shape, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    landing = receiver.engine.open_landing("sender")
    sending = sender.engine.connect("receiver", landing.address)
    receiver.engine.expect(landing, pack(1, 1), COUNT)
    sender.engine.write(sending, pages(sender.region, receiver.region.remote, list(range(COUNT)), PAGE, pack(1, 1)))
    drive(sender.party, receiver.party, until=lambda: bool(receiver.party.of(Arrived)))
    assert torch.equal(receiver.bytes[: COUNT * PAGE], sender.bytes[: COUNT * PAGE])


def test_what_leaves_when_the_devices_word_moves_is_what_the_kernels_before_it_wrote(
    sides: tuple[Side, Side], driver: CudaDriver
) -> None:
    """Layer by layer, while the device is still at work on later ones: no byte is older than the word."""
    sender, receiver = sides
    landing = receiver.engine.open_landing("sender")
    sending = sender.engine.connect("receiver", landing.address)
    receiver.engine.expect(landing, pack(1, 1), LAYERS)
    busy = torch.ones(2048, 2048, device="cuda")
    with DeviceProgressWord(driver) as word:
        word.map(0)
        for layer in range(LAYERS):
            batch = pages(sender.region, receiver.region.remote, [layer], PAGE, pack(1, 1))
            sender.engine.write_when(sending, word.address, layer + 1, batch)
        for layer in range(LAYERS):
            busy @ busy
            sender.bytes[layer * PAGE : (layer + 1) * PAGE] = layer + 1
            word.advance()
        drive(sender.party, receiver.party, until=lambda: bool(receiver.party.of(Arrived)))
        torch.cuda.synchronize()
        assert word.value == LAYERS
    assert all(ended.error is None for ended in sender.party.of(WritesEnded))
    received = receiver.bytes[: LAYERS * PAGE].view(LAYERS, PAGE).cpu()
    assert torch.equal(received, torch.arange(1, LAYERS + 1, dtype=torch.uint8)[:, None].expand(LAYERS, PAGE))
