"""Forwards on CUDA: the same tokens eager and captured, waiting and overlapped, padded and not."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import assemble
from engine.config import ContinuousBatchingConfig
from engine.cuda_driver import CudaDriver
from engine.cuda_placing import place_on_cuda
from engine.device_runner import DeviceRunner
from engine.engine import Engine
from engine.models.loading import load_model
from engine.placing import engine_of
from protocol.layout import DType
from tests.engine.driving import greedy_request, prefill_here, run
from tests.engine.tiny_models import greedy, prompt_of

NEW = 12
PROMPTS = {f"r{length}": prompt_of(length) for length in (5, 19, 1, 40, 33)}

EngineOn = Callable[..., Engine]


def config_of(graphs: bool = False, asynchronous: bool = False, num_blocks: int = 64) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(
        page_size=16,
        num_blocks=num_blocks,
        max_batch_tokens=48,
        max_requests_per_batch=8,
        safety_margin=0.0,
        use_cuda_graph=graphs,
        use_async_batching=asynchronous,
        q_padding_interval_size=16,
        kv_padding_interval_size=64,
        debug_pages=True,
    )


@pytest.fixture
def engine_on(device: torch.device, driver: CudaDriver) -> Iterator[EngineOn]:
    """Engines as a node would have them, but for the kernels; closed at the end."""
    with ExitStack() as opened:

        def build(
            directory: Path, kernels: Any, dtype: DType = "float16", host_chunks: int = 0, **settings: Any
        ) -> Engine:
            loaded, config = load_model(directory, dtype), config_of(**settings)
            space = host_chunks * loaded.geometry(config.page_size).chunk_bytes / (1 << 30)
            config = replace(config, cpu_offload_space=space)
            engine = assemble(loaded, config, device, lambda: kernels)
            opened.callback(engine.close)
            return engine

        yield build


def layers_of(engine: Engine) -> int:
    return sum(len(group.layers) for group in engine.pool.geometry.groups)


def answers(engine: Engine, prompts: dict[str, list[int]] = PROMPTS) -> dict[str, list[int]]:
    for request_id, prompt in prompts.items():
        engine.add(greedy_request(request_id, prompt, NEW))
    return dict(run(engine).tokens)


def test_float32_in_plain_torch_gives_the_oracles_tokens(engine_on: EngineOn, llama_64: Path) -> None:
    engine = engine_on(llama_64, None, "float32")
    assert answers(engine) == {name: greedy(llama_64, prompt, NEW) for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize("model", ["llama_64", "gemma_64"])
@pytest.mark.parametrize(("graphs", "asynchronous"), [(False, False), (True, False), (True, True)])
def test_every_way_to_run_gives_the_same_tokens(
    request: pytest.FixtureRequest, engine_on: EngineOn, kernels: Any, model: str, graphs: bool, asynchronous: bool
) -> None:
    directory = request.getfixturevalue(model)
    plain = engine_on(directory, None)
    engine = engine_on(directory, kernels, graphs=graphs, asynchronous=asynchronous)
    assert answers(engine) == answers(plain)


@pytest.mark.parametrize(("graphs", "asynchronous"), [(False, False), (True, False), (True, True)])
def test_the_word_grows_by_one_for_each_layer_of_each_forward(
    engine_on: EngineOn, llama_64: Path, kernels: Any, graphs: bool, asynchronous: bool
) -> None:
    """Eager, captured and replayed; with a forward in flight behind each."""
    engine = engine_on(llama_64, kernels, graphs=graphs, asynchronous=asynchronous)
    answers(engine)
    answers(engine, {f"again-{name}": prompt for name, prompt in PROMPTS.items()})
    torch.cuda.synchronize()
    assert engine.counters.batches > 2 * NEW
    assert engine.progress.value == layers_of(engine) * engine.counters.batches


@pytest.mark.parametrize("graphs", [False, True])
def test_a_prefill_engine_leaves_what_plain_torch_leaves_in_its_pages(
    engine_on: EngineOn, llama_64: Path, kernels: Any, graphs: bool
) -> None:
    prompt = prompt_of(60)
    plain, engine = engine_on(llama_64, None), engine_on(llama_64, kernels, graphs=graphs)
    written = []
    for each in (plain, engine):
        blocks = prefill_here(each, {"p": prompt})["p"]
        torch.cuda.synchronize()
        assert each.progress.value == 2 * layers_of(each), "in two chunks"
        written.append(each.pool.pages(0)[blocks[:3]].cpu().float())
        each.release("p")
    torch.testing.assert_close(written[0], written[1], atol=2e-2, rtol=2e-2)


def test_captured_forwards_are_replayed(device: torch.device, driver: CudaDriver, llama_64: Path, kernels: Any) -> None:
    loaded, config = load_model(llama_64, "float16"), config_of(graphs=True, asynchronous=True)
    placed = place_on_cuda(loaded, config, device, kernels, driver)
    engine, runner = engine_of(loaded, config, placed), placed.runner
    assert isinstance(runner, DeviceRunner)
    first = answers(engine)
    captures = sum(cache.captures for cache in runner.graph_caches)
    assert answers(engine, {f"again-{name}": prompt for name, prompt in PROMPTS.items()}) == {
        f"again-{name}": tokens for name, tokens in first.items()
    }
    replays = sum(cache.replays for cache in runner.graph_caches)
    engine.close()
    assert captures > 0
    assert replays > captures


def test_blocks_that_were_offloaded_come_back_between_two_forwards(
    engine_on: EngineOn, llama_64: Path, kernels: Any
) -> None:
    """Copies on the engine's own stream lie between forwards that nobody waited for."""
    engine = engine_on(llama_64, kernels, graphs=True, asynchronous=True, num_blocks=28, host_chunks=64)
    long = {f"long{n}": prompt_of(180, seed=n) for n in range(4)}
    calm = {name: answers(engine, {name: prompt})[name] for name, prompt in long.items()}
    assert answers(engine, {f"busy-{name}": prompt for name, prompt in long.items()}) == {
        f"busy-{name}": tokens for name, tokens in calm.items()
    }
    assert engine.counters.offloads


def test_the_sink_takes_the_padding_and_the_zeros_stay(engine_on: EngineOn, llama_64: Path, kernels: Any) -> None:
    engine = engine_on(llama_64, kernels, graphs=True)
    answers(engine)
    blocks = engine.pool.geometry.blocks_per_chunk[0]
    pages = engine.pool.pages(0)
    assert not pages[:blocks].any()
    assert not torch.isnan(pages[blocks : 2 * blocks]).all()


def test_an_engine_sized_from_the_devices_memory_gives_the_oracles_tokens(
    device: torch.device, driver: CudaDriver, llama_64: Path
) -> None:
    config = ContinuousBatchingConfig(
        page_size=16, max_batch_tokens=48, max_requests_per_batch=8, max_memory_percent=0.1
    )
    engine = assemble(load_model(llama_64), config, device)
    assert answers(engine) == {name: greedy(llama_64, prompt, NEW) for name, prompt in PROMPTS.items()}
    engine.close()


def test_closing_an_engine_gives_its_pages_back(driver: CudaDriver, llama_64: Path) -> None:
    config = ContinuousBatchingConfig(page_size=16, max_batch_tokens=48, max_memory_percent=0.5)
    free = torch.cuda.mem_get_info()[0]
    engine = assemble(load_model(llama_64), config, torch.device("cuda"), lambda: None)
    assert torch.cuda.mem_get_info()[0] < 0.7 * free
    engine.close()
    assert torch.cuda.mem_get_info()[0] > 0.7 * free
