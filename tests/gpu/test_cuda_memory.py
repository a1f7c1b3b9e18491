"""The driver's own virtual memory: pages that another process maps, and a pool in them."""

import os
import subprocess
import sys

import pytest
import torch

from engine.cuda_driver import CudaDriver
from engine.cuda_memory import allocate, can_reach_nic, map_shared
from engine.errors import DeviceRefused
from tests.engine.fake_cuda import FakeApi
from tests.fabric.child import ROOT

SIZE = 5 << 20

FILL_FROM_ANOTHER_PROCESS = """
import sys, torch
from engine.cuda_driver import installed_driver
from engine.cuda_memory import map_shared
torch.cuda.init()
with map_shared(installed_driver(), 0, int(sys.argv[1]), int(sys.argv[2])) as memory:
    memory.tensor()[:] = 123
    torch.cuda.synchronize()
"""


@pytest.fixture(autouse=True)
def context(device: torch.device) -> None:
    torch.zeros(1, device=device)


def test_kernels_write_to_it(driver: CudaDriver) -> None:
    with allocate(driver, 0, SIZE) as memory:
        assert memory.size >= SIZE
        tensor = memory.tensor()
        assert (tensor.data_ptr(), tensor.numel(), tensor.device.index) == (memory.address, memory.size, 0)
        tensor.fill_(7)
        assert int(tensor.sum(dtype=torch.int64)) == 7 * memory.size
        torch.cuda.synchronize()


def test_another_process_maps_it_by_its_descriptor(driver: CudaDriver) -> None:
    with allocate(driver, 0, SIZE) as memory:
        fd = memory.export()
        command = [sys.executable, "-c", FILL_FROM_ANOTHER_PROCESS, str(fd), str(memory.size)]
        subprocess.run(command, pass_fds=[fd], cwd=ROOT, check=True, timeout=120)
        os.close(fd)
        assert bool((memory.tensor() == 123).all())


def test_it_can_be_mapped_twice_here(driver: CudaDriver) -> None:
    with allocate(driver, 0, SIZE) as memory:
        fd = memory.export()
        with map_shared(driver, 0, fd, memory.size) as mapped:
            os.close(fd)
            assert mapped.address != memory.address
            memory.tensor()[5] = 200
            assert mapped.tensor()[5].item() == 200
            torch.cuda.synchronize()


def test_closing_gives_the_memory_back(driver: CudaDriver) -> None:
    free = torch.cuda.mem_get_info()[0]
    size = 256 << 20
    memory = allocate(driver, 0, size)
    assert torch.cuda.mem_get_info()[0] <= free - size // 2
    memory.close()
    assert torch.cuda.mem_get_info()[0] > free - size // 2


def test_a_call_that_the_driver_refuses_is_named(driver: CudaDriver) -> None:
    with pytest.raises(DeviceRefused, match="cuMemCreate: CUDA_ERROR_"):
        allocate(driver, 0, 1 << 45)


def test_whether_a_nic_can_reach_it_is_known(driver: CudaDriver) -> None:
    why = can_reach_nic(driver, 0)
    assert why is None or "CUDA device 0 does not" in why


def test_the_fake_driver_knows_no_function_that_the_real_one_lacks(driver: CudaDriver) -> None:
    functions = [name for name in dir(FakeApi) if name.lower().startswith("cu")]
    assert [name for name in functions if not hasattr(driver.api, name)] == []
