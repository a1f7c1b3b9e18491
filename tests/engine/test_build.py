"""Putting an engine together: what is refused before anything large is read, and what comes out of the settings."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.build import build_engine, check_movable
from engine.config import ContinuousBatchingConfig
from engine.errors import DeviceRefused, NoDevice
from engine.options import EngineOptions
from tests.tiny_model import save_weights

SMALL = ContinuousBatchingConfig(page_size=16, num_blocks=8, max_batch_tokens=32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(NoDevice, match="--device cuda"):
        build_engine(EngineOptions(Path("nowhere"), SMALL, threads=1, device="cuda"), head=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_node_asks_first_whether_its_pages_can_be_moved() -> None:
    on_cuda = EngineOptions(Path("nowhere"), SMALL, threads=1, device="cuda")
    check_movable(replace(on_cuda, device="cpu"))
    with pytest.raises(NoDevice, match="no GPU is there"):
        check_movable(on_cuda)
    with pytest.raises(DeviceRefused, match=r"--debug-pages .* host's memory"):
        check_movable(replace(on_cuda, batching=replace(SMALL, debug_pages=True)))


def test_models_with_a_window_share_no_prefixes(tmp_path: Path) -> None:
    folder = save_weights(tmp_path / "mistral", "mistral", sliding_window=8)
    engine = build_engine(EngineOptions(folder, SMALL, threads=1), head=True)
    assert engine.prefix is None
    engine.close()


def test_without_a_number_of_blocks_the_memory_share_decides(tmp_path: Path) -> None:
    folder = save_weights(tmp_path / "llama")
    config = ContinuousBatchingConfig(page_size=16, max_batch_tokens=32, max_memory_percent=0.001)
    engine = build_engine(EngineOptions(folder, config, threads=1), head=True)
    assert engine.pages_total > 8
    engine.close()


def test_sizes_that_do_not_fit_say_what_to_lower(tmp_path: Path) -> None:
    folder = save_weights(tmp_path / "llama")
    config = ContinuousBatchingConfig(page_size=16, num_blocks=1 << 30, max_batch_tokens=32)
    with pytest.raises(MemoryError, match="lower num_blocks to"):
        build_engine(EngineOptions(folder, config, threads=1), head=True)


def test_host_memory_for_offloading_is_there_if_it_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "engine")
    folder = save_weights(tmp_path / "llama")
    config = ContinuousBatchingConfig(page_size=16, num_blocks=8, max_batch_tokens=32, cpu_offload_space=0.001)
    engine = build_engine(EngineOptions(folder, config, threads=1), head=True)
    assert engine.offload is not None and engine.offload.total > 0
    assert "cpu_offload_space: 1.02 MiB of host memory" in caplog.text
    engine.close()
