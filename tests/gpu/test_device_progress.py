"""The word that the device advances: eager, captured and replayed, and what is there once it has moved."""

import mmap
import time
from collections.abc import Iterator

import pytest
import torch

from engine.cuda_driver import CudaDriver
from engine.cuda_graphs import CudaCapture
from engine.device_progress import DeviceProgressWord
from engine.progress import ProgressWord

LAYERS = 16
DEADLINE_S = 20.0


@pytest.fixture
def word(device: torch.device, driver: CudaDriver) -> Iterator[DeviceProgressWord]:
    torch.zeros(1, device=device)
    with DeviceProgressWord(driver) as made:
        made.map(0)
        yield made
        torch.cuda.synchronize()


def wait_for(word: ProgressWord, value: int) -> None:
    end = time.monotonic() + DEADLINE_S
    while word.value < value:
        assert time.monotonic() < end, f"the word stays at {word.value}, below {value}"


def test_the_host_sees_what_the_device_added_without_asking_for_it(word: DeviceProgressWord) -> None:
    """Polled, as the messenger does: no call of CUDA's waits for the device."""
    for _ in range(LAYERS):
        word.advance()
    wait_for(word, LAYERS)
    torch.cuda.synchronize()
    assert word.value == LAYERS


def test_it_stands_while_the_device_is_at_work_before_it(word: DeviceProgressWord) -> None:
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
    word.advance()
    assert word.value == 0, "enqueued, not done"
    wait_for(word, 1)


def test_a_captured_addition_adds_at_each_replay_and_not_when_it_is_captured(word: DeviceProgressWord) -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    capture = CudaCapture(stream)

    def forward() -> None:
        for _ in range(LAYERS):
            word.advance()

    with torch.cuda.stream(stream):
        forward()
        replay = capture(forward)
        stream.synchronize()
        assert word.value == LAYERS
        for _ in range(5):
            replay()
        stream.synchronize()
    assert word.value == 6 * LAYERS


def test_two_processes_words_on_one_page_are_one(device: torch.device, driver: CudaDriver) -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    polled = ProgressWord(page)
    with DeviceProgressWord(driver, page) as word:
        word.map(0)
        word.advance()
        wait_for(polled, 1)
        torch.cuda.synchronize()


def test_what_was_written_before_the_word_moved_is_there_when_it_has(word: DeviceProgressWord) -> None:
    """Copied out by the copy engine on another stream, while later layers are still being written."""
    pages = torch.zeros(LAYERS, 1 << 20, dtype=torch.uint8, device="cuda")
    copies = torch.zeros(LAYERS, 1 << 20, dtype=torch.uint8, pin_memory=True)
    busy, aside = torch.ones(2048, 2048, device="cuda"), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for layer in range(LAYERS):
        busy @ busy
        pages[layer] = layer + 1
        word.advance()
    with torch.cuda.stream(aside):
        for layer in range(LAYERS):
            wait_for(word, layer + 1)
            copies[layer].copy_(pages[layer], non_blocking=True)
        aside.synchronize()
    assert torch.equal(copies, torch.arange(1, LAYERS + 1, dtype=torch.uint8)[:, None].expand_as(copies))
