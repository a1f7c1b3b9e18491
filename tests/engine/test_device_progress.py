"""The word that a device advances, over a driver whose devices have host memory."""

import mmap

import pytest
import torch

from engine.device_progress import DeviceProgressWord
from engine.errors import DeviceRefused
from engine.progress import ProgressWord
from tests.engine.fake_cuda import FakeDriver


def test_the_host_reads_what_the_device_adds() -> None:
    driver = FakeDriver()
    with DeviceProgressWord(driver) as word:
        word.map(0)
        word.advance()
        word.advance()
        assert word.value == 2
        assert not driver.api.contexts, "the caller's context is current again"
    assert driver.api.nothing_left
    assert word.value == 2, "it can be polled after the device has let go of it"


def test_a_word_in_shared_memory_is_advanced_in_one_process_and_polled_in_another() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    polled = ProgressWord(page)
    with DeviceProgressWord(FakeDriver(), page) as word:
        word.map(1)
        word.advance()
        assert polled.value == 1


def test_it_goes_on_where_it_was() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    ProgressWord(page).advance()
    with DeviceProgressWord(FakeDriver(), page) as word:
        word.map(0)
        word.advance()
        assert word.value == 2


def test_values_beyond_half_of_the_range_are_counted_right() -> None:
    """The device adds to a signed word, the host reads an unsigned one."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    torch.frombuffer(page, dtype=torch.int64)[0] = torch.iinfo(torch.int64).max
    with DeviceProgressWord(FakeDriver(), page) as word:
        word.map(0)
        word.advance()
        assert word.value == 1 << 63


@pytest.mark.parametrize("call", ["cuMemHostRegister", "cuMemHostGetDevicePointer"])
def test_a_device_that_cannot_map_it_is_refused_and_keeps_nothing(call: str) -> None:
    driver = FakeDriver()
    driver.api.fails = call
    word = DeviceProgressWord(driver)
    with pytest.raises(DeviceRefused, match=call):
        word.map(0)
    assert driver.api.nothing_left
    word.close()
