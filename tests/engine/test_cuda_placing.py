"""An engine put together for CUDA, on a device that is the CPU's own: driver, queues and captures are fakes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import cuda
from engine.config import ContinuousBatchingConfig
from engine.cuda_placing import place_on_cuda
from engine.engine import Engine
from engine.errors import DeviceRefused
from engine.models.loading import load_model
from engine.placing import CPU, engine_of
from protocol.layout import DType
from tests.engine import fake_flashinfer
from tests.engine.driving import greedy_request, run
from tests.engine.fake_cuda import GRANULARITY, FakeDriver
from tests.engine.fake_device import ImmediateStreams, record
from tests.engine.tiny_models import greedy, prompt_of
from tests.tiny_model import save_weights

NEW = 6
PROMPTS = {f"r{length}": prompt_of(length) for length in (5, 19, 40)}


class CpuStreams(ImmediateStreams):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.computing = None


@pytest.fixture(autouse=True)
def queues_and_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "CudaStreams", CpuStreams)
    monkeypatch.setattr(cuda, "CudaCapture", lambda stream: record)


def engine_on(
    driver: FakeDriver, directory: Path, dtype: DType = "float32", kernels: Any = None, graphs: bool = False
) -> Engine:
    config = ContinuousBatchingConfig(
        page_size=16,
        num_blocks=32,
        max_batch_tokens=48,
        max_requests_per_batch=4,
        use_cuda_graph=graphs,
        use_async_batching=graphs,
        q_padding_interval_size=16,
        kv_padding_interval_size=64,
    )
    loaded = load_model(directory, dtype)
    return engine_of(loaded, config, place_on_cuda(loaded, config, CPU, kernels, driver))


def answers(engine: Engine) -> dict[str, list[int]]:
    for request_id, prompt in PROMPTS.items():
        engine.add(greedy_request(request_id, prompt, NEW))
    return dict(run(engine).tokens)


def assert_every_layer_was_counted(engine: Engine) -> None:
    layers = sum(len(group.layers) for group in engine.pool.geometry.groups)
    assert engine.progress.value == layers * engine.counters.batches > 0


def test_its_tokens_are_the_oracles_and_its_word_counts_every_layer(tiny_llama: Path) -> None:
    engine = engine_on(FakeDriver(), tiny_llama)
    assert answers(engine) == {name: greedy(tiny_llama, prompt, NEW) for name, prompt in PROMPTS.items()}
    assert_every_layer_was_counted(engine)
    engine.close()


def test_latent_vectors_go_through_plain_torch_and_the_log_says_so(
    tiny_kind: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory = tiny_kind("deepseek-v3")
    engine = engine_on(FakeDriver(), directory, kernels=fake_flashinfer)
    assert answers(engine) == {name: greedy(directory, prompt, NEW) for name, prompt in PROMPTS.items()}
    assert_every_layer_was_counted(engine)
    assert "plain torch, slower: latent vectors (MLA)" in caplog.text
    engine.close()


@pytest.mark.parametrize("graphs", [False, True])
def test_captured_and_overlapping_forwards_give_the_same_and_count_the_same(tmp_path: Path, graphs: bool) -> None:
    directory = save_weights(tmp_path / "llama", head_dim=64)
    plain = engine_on(FakeDriver(), directory, "float16")
    engine = engine_on(FakeDriver(), directory, "float16", fake_flashinfer, graphs)
    assert answers(engine) == answers(plain)
    for each in (engine, plain):
        assert_every_layer_was_counted(each)
        each.close()


def test_its_pages_are_memory_that_others_can_be_given_until_it_closes(tiny_llama: Path) -> None:
    driver = FakeDriver()
    engine = engine_on(driver, tiny_llama)
    (pages,) = engine.pools
    assert driver.api.mapped == {pages.address: -(-pages.bytes // GRANULARITY) * GRANULARITY}
    assert not engine.pool.raw_blocks(0).any()
    engine.close()
    assert driver.api.nothing_left


@pytest.mark.parametrize("call", ["cuMemHostRegister", "cuMemCreate", "cuMemSetAccess"])
def test_a_device_that_refuses_on_the_way_keeps_nothing(tiny_llama: Path, call: str) -> None:
    driver = FakeDriver()
    driver.api.fails = call
    with pytest.raises(DeviceRefused, match=call):
        engine_on(driver, tiny_llama)
    assert driver.api.nothing_left
