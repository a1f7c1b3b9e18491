"""Memory of a device that other processes map, over a driver whose devices have host memory."""

import os
import socket
import subprocess
import sys

import pytest
import torch

from engine.cache_pool import CachePool, aligned, pool_bytes
from engine.cuda_driver import CudaDriver
from engine.cuda_memory import allocate, can_reach_nic, map_shared
from engine.errors import DeviceRefused
from engine.geometry import full_geometry
from engine.workers.channel import Channel
from engine.workers.messages import Answer, Order, Serve
from protocol.layout import full_layout
from tests.engine.fake_cuda import GRANULARITY, CUdevice_attribute, FakeDriver
from tests.engine.fake_workers import ROOT, open_files

SIZE = GRANULARITY + 5


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


def test_a_device_is_known_by_its_pci_address_as_sysfs_spells_it(driver: FakeDriver) -> None:
    assert driver.pci_address(0) == "0000:1b:00.0"


def test_sizes_are_rounded_up_to_the_devices_granularity(driver: FakeDriver) -> None:
    with allocate(driver, 3, SIZE) as memory:
        assert memory.size == 2 * GRANULARITY
        (properties,) = driver.api.created
        assert (properties.location.id, properties.allocFlags.gpuDirectRDMACapable) == (3, 1)


def test_who_maps_what_was_exported_sees_the_same_bytes(driver: FakeDriver) -> None:
    with allocate(driver, 0, SIZE) as memory:
        fd = memory.export()
        with map_shared(driver, 0, fd, memory.size) as mapped:
            os.close(fd)
            assert mapped.address != memory.address
            memory.tensor()[7] = 200
            assert mapped.tensor()[7] == 200


WRITE_FROM_ANOTHER_PROCESS = """
import sys
from engine.cuda_memory import map_shared
from tests.engine.fake_cuda import FakeDriver
with map_shared(FakeDriver(), 0, int(sys.argv[1]), int(sys.argv[2])) as memory:
    memory.tensor()[-1] = 123
"""


def test_another_process_maps_it_by_its_descriptor(driver: FakeDriver) -> None:
    with allocate(driver, 0, SIZE) as memory:
        fd = memory.export()
        command = [sys.executable, "-c", WRITE_FROM_ANOTHER_PROCESS, str(fd), str(memory.size)]
        subprocess.run(command, pass_fds=[fd], cwd=ROOT, check=True, timeout=100)
        os.close(fd)
        assert memory.tensor()[-1] == 123


def test_its_descriptor_travels_to_a_worker_as_that_of_shared_memory_does(driver: FakeDriver) -> None:
    ours, theirs = socket.socketpair()
    with (
        allocate(driver, 0, SIZE) as memory,
        Channel[Answer](ours, Answer) as main,
        Channel[Order](theirs, Order) as worker,
    ):
        sent = memory.export()
        main.send(Serve(16, 5), [sent])
        os.close(sent)
        memory.tensor()[3] = 33
        _, (received,) = worker.receive_with_fds()
        with map_shared(driver, 0, received, memory.size) as mapped:
            assert mapped.tensor()[3] == 33
        os.close(received)


def test_it_outlives_its_owner_where_it_is_mapped(driver: FakeDriver) -> None:
    memory = allocate(driver, 0, SIZE)
    fd = memory.export()
    memory.tensor()[0] = 9
    memory.close()
    with map_shared(driver, 0, fd, memory.size) as mapped:
        assert mapped.tensor()[0] == 9
    os.close(fd)


def test_closing_gives_everything_back_and_may_be_repeated(driver: FakeDriver) -> None:
    before = open_files()
    memory = allocate(driver, 0, SIZE)
    memory.close()
    memory.close()
    assert driver.api.nothing_left
    assert open_files() == before


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_a_step_that_fails_undoes_those_before_it(driver: FakeDriver, call: str) -> None:
    driver.api.fails = call
    with pytest.raises(DeviceRefused, match=f"{call}: CUDA_ERROR_OUT_OF_MEMORY"):
        allocate(driver, 0, SIZE)
    assert driver.api.nothing_left


@pytest.mark.parametrize(
    ("attribute", "lacking"),
    [
        ("VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED", "virtual memory management"),
        ("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "other processes"),
    ],
)
def test_a_device_that_cannot_share_its_memory_is_refused(driver: FakeDriver, attribute: str, lacking: str) -> None:
    driver.api.attributes[CUdevice_attribute[f"CU_DEVICE_ATTRIBUTE_{attribute}"]] = 0
    with pytest.raises(DeviceRefused, match=f"CUDA device 0 has no .*{lacking}"):
        allocate(driver, 0, SIZE)


@pytest.mark.parametrize(
    ("attribute", "value", "why"),
    [
        ("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", 0, "GPUDirect RDMA"),
        ("GPU_DIRECT_RDMA_WRITES_ORDERING", 0, "order"),
    ],
)
def test_memory_that_no_nic_can_reach_is_not_asked_for(
    driver: FakeDriver, attribute: str, value: int, why: str
) -> None:
    """It is of use all the same: not every engine moves KV."""
    assert can_reach_nic(driver, 0) is None
    driver.api.attributes[CUdevice_attribute[f"CU_DEVICE_ATTRIBUTE_{attribute}"]] = value
    assert why in (can_reach_nic(driver, 0) or "")
    with allocate(driver, 0, SIZE):
        assert driver.api.created[0].allocFlags.gpuDirectRDMACapable == 0


def test_a_cache_pool_lies_in_it(driver: FakeDriver) -> None:
    layout = full_layout(layers=3, kv_heads=2, page_size=4, head_dim=8, dtype="float32")
    geometry = full_geometry(layout)
    size = aligned(pool_bytes(geometry, 5))
    with allocate(driver, 0, size) as memory:
        pool = CachePool(geometry, 5, memory=memory.tensor()[:size])
        pool.pages(0)[4] = 1.5
        assert pool.address == memory.address
        assert memory.tensor().view(torch.float32).count_nonzero() == pool.pages(0)[4].numel()


def test_the_driver_says_which_call_failed(driver: CudaDriver) -> None:
    with pytest.raises(DeviceRefused, match="cuMemRelease: CUDA_ERROR_INVALID_VALUE"):
        driver.call("cuMemRelease", 12345)
