"""Forwards on CUDA: the same tokens eager and captured, waiting and overlapped, padded and not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import assemble
from engine.cache_pool import CachePool
from engine.config import ContinuousBatchingConfig
from engine.cuda import choose_cuda, cuda_runner
from engine.device_runner import DeviceRunner
from engine.engine import Engine, EngineParts
from engine.limits import Limits
from engine.models.loading import load_model
from engine.progress import ProgressWord
from protocol.layout import DType
from tests.engine.driving import greedy_request, run
from tests.engine.tiny_models import greedy, prompt_of

NEW = 12
PROMPTS = {f"r{length}": prompt_of(length) for length in (5, 19, 1, 40, 33)}
DEVICE = "cuda"


def engine_on(
    directory: Path,
    kernels: Any,
    dtype: DType = "float16",
    graphs: bool = False,
    asynchronous: bool = False,
    num_blocks: int = 64,
    host_chunks: int = 0,
) -> tuple[Engine, DeviceRunner]:
    config = ContinuousBatchingConfig(
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
    loaded = load_model(directory, dtype)
    loaded.model.to(DEVICE)
    geometry = loaded.geometry(config.page_size)
    choice = choose_cuda(loaded, geometry, config, kernels)
    pool = CachePool(geometry, geometry.chunks_for(num_blocks), config.debug_pages, device=DEVICE)
    progress = ProgressWord()
    runner = cuda_runner(loaded, pool, progress, config, choice)
    limits = Limits(
        loaded.vocab_size, loaded.max_positions, pool.geometry.max_tokens(pool.num_chunks), loaded.eos_token_ids
    )
    parts = EngineParts(
        pool=pool,
        runner=runner,
        progress=progress,
        limits=limits,
        host_pool=CachePool(geometry, host_chunks, reserved=0) if host_chunks else None,
        asynchronous=choice.modes.asynchronous,
    )
    return Engine(config, parts), runner


def answers(engine: Engine, prompts: dict[str, list[int]] = PROMPTS) -> dict[str, list[int]]:
    for request_id, prompt in prompts.items():
        engine.add(greedy_request(request_id, prompt, NEW))
    return dict(run(engine).tokens)


def test_float32_in_plain_torch_gives_the_oracles_tokens(llama_64: Path) -> None:
    engine, _ = engine_on(llama_64, None, "float32")
    assert answers(engine) == {name: greedy(llama_64, prompt, NEW) for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize("model", ["llama_64", "gemma_64"])
@pytest.mark.parametrize(("graphs", "asynchronous"), [(False, False), (True, False), (True, True)])
def test_every_way_to_run_gives_the_same_tokens(
    request: pytest.FixtureRequest, kernels: Any, model: str, graphs: bool, asynchronous: bool
) -> None:
    directory = request.getfixturevalue(model)
    plain, _ = engine_on(directory, None)
    engine, _ = engine_on(directory, kernels, graphs=graphs, asynchronous=asynchronous)
    assert answers(engine) == answers(plain)


def test_captured_forwards_are_replayed(llama_64: Path, kernels: Any) -> None:
    engine, runner = engine_on(llama_64, kernels, graphs=True, asynchronous=True)
    first = answers(engine)
    captures = sum(cache.captures for cache in runner.graph_caches)
    assert answers(engine, {f"again-{name}": prompt for name, prompt in PROMPTS.items()}) == {
        f"again-{name}": tokens for name, tokens in first.items()
    }
    replays = sum(cache.replays for cache in runner.graph_caches)
    assert captures > 0
    assert replays > captures


def test_blocks_that_were_offloaded_come_back_between_two_forwards(llama_64: Path, kernels: Any) -> None:
    """Copies on the engine's own stream lie between forwards that nobody waited for."""
    engine, _ = engine_on(llama_64, kernels, graphs=True, asynchronous=True, num_blocks=28, host_chunks=64)
    long = {f"long{n}": prompt_of(180, seed=n) for n in range(4)}
    calm = {name: answers(engine, {name: prompt})[name] for name, prompt in long.items()}
    assert answers(engine, {f"busy-{name}": prompt for name, prompt in long.items()}) == {
        f"busy-{name}": tokens for name, tokens in calm.items()
    }
    assert engine.counters.offloads


def test_the_sink_takes_the_padding_and_the_zeros_stay(llama_64: Path, kernels: Any) -> None:
    engine, _ = engine_on(llama_64, kernels, graphs=True)
    answers(engine)
    blocks = engine.pool.geometry.blocks_per_chunk[0]
    pages = engine.pool.pages(0)
    assert not pages[:blocks].any()
    assert not torch.isnan(pages[blocks : 2 * blocks]).all()


def test_an_engine_sized_from_the_devices_memory_gives_the_oracles_tokens(llama_64: Path) -> None:
    config = ContinuousBatchingConfig(
        page_size=16, max_batch_tokens=48, max_requests_per_batch=8, max_memory_percent=0.1
    )
    engine = assemble(load_model(llama_64), config, torch.device(DEVICE))
    assert answers(engine) == {name: greedy(llama_64, prompt, NEW) for name, prompt in PROMPTS.items()}
    engine.close()
