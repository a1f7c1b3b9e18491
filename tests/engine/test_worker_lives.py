"""More lives of engines of several processes, and other ways to put such engines together. Each starts processes."""

import json
import random
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.__main__ import main
from engine.build import build_engine, build_engines
from engine.engine import Engine
from engine.options import EngineOptions
from engine.request import Request
from protocol.messages import FinishReason
from protocol.sampling import SamplingParams
from tests.engine.driving import (
    MAX_STEPS,
    Gathered,
    assert_at_rest,
    greedy_request,
    model_engine,
    prefill_here,
    run,
)
from tests.engine.lively import LIVELY, lively_requests, rank_pages
from tests.engine.tiny_models import NEW, WINDOW_PROMPTS, continued, greedy, prompt_of
from tests.tiny_model import save_tiny_model

pytestmark = pytest.mark.slow
LIVES = 12


def options(folder: Path, tp: int) -> EngineOptions:
    return EngineOptions(folder, LIVELY, threads=1, tp=tp)


def random_life(engine: Engine, waiting: list[Request], chance: random.Random) -> Gathered:
    """Requests come at any time, and some are cancelled."""
    gathered = Gathered()
    for _ in range(MAX_STEPS):
        if not engine.has_work and not waiting:
            return gathered
        while waiting and chance.random() < 0.4:
            engine.add(waiting.pop())
        if chance.random() < 0.04:
            engine.abort(f"r{chance.randrange(10)}")
        gathered.take(engine.step())
        engine.check()
    raise AssertionError(f"still at work after {MAX_STEPS} steps")


@pytest.mark.timeout(600)
def test_no_life_of_several_devices_differs_from_one_devices(tiny_llama: Path, seed: int) -> None:
    chance = random.Random(seed)
    alone = model_engine(tiny_llama, page_size=4, num_blocks=400, max_batch_tokens=400)
    with ExitStack() as stack:
        engines = build_engines(options(tiny_llama, tp=2), head=True, count=2)
        for engine in engines:
            stack.enter_context(closing(engine))
        for life in range(LIVES):
            engine = engines[life % 2]
            kind = chance.randrange(100)
            gathered = random_life(engine, lively_requests(kind), chance)
            for request in lively_requests(kind):
                alone.add(request)
            expected = run(alone).tokens
            assert gathered.ended.keys() == expected.keys()
            for name, ended in gathered.ended.items():
                tokens = gathered.tokens[name]
                assert tokens == expected[name][: len(tokens)]
                assert ended.reason is FinishReason.CANCELLED or len(tokens) == len(expected[name])
            assert_at_rest(engine)


def test_a_node_that_never_samples_fills_every_ranks_pages(tiny_llama: Path) -> None:
    prompt = prompt_of(42)
    alone = model_engine(tiny_llama, page_size=4, num_blocks=32, max_batch_tokens=24, head=False)
    with closing(build_engine(options(tiny_llama, tp=2), head=False)) as engine:
        pages = []
        for one in (alone, engine):
            table = prefill_here(one, {"P": prompt})["P"][: len(prompt) // 4]
            pages.append(torch.cat([rank_pages(one, rank, table) for rank in range(len(one.pools))], dim=2))
            one.release("P")
        torch.testing.assert_close(pages[1], pages[0], rtol=1e-4, atol=1e-4)
        assert_at_rest(engine)


def test_four_ranks_share_two_heads(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", kv_heads=2)
    prompt = prompt_of(30)
    with closing(build_engine(options(folder, tp=4), head=True)) as engine:
        engine.add(greedy_request("A", prompt, 12))
        assert run(engine).tokens == {"A": greedy(folder, prompt, 12)}
        assert (engine.layout.replica_sets, engine.layout.kv_heads, len(engine.pools)) == (2, 2, 4)


def test_layers_with_windows_run_on_several_devices(tiny_kind: Callable[[str], Path]) -> None:
    folder = tiny_kind("gemma2")
    with closing(build_engine(options(folder, tp=2), head=True)) as engine:
        for name, prompt in WINDOW_PROMPTS.items():
            engine.add(greedy_request(name, prompt, NEW))
        assert run(engine).tokens == continued(folder)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_engines_of_one_device_each_run_beside_one_another(tiny_llama: Path, asynchronous: bool) -> None:
    """Tokens that one forward carries to the next stay inside the worker."""
    config = replace(LIVELY, use_async_batching=asynchronous)
    penalised = SamplingParams(max_new_tokens=10, repetition_penalty=1.5)
    prompts = [prompt_of(length, seed=3) for length in (3, 20, 33)]
    results = []
    with ExitStack() as stack:
        for engine in build_engines(EngineOptions(tiny_llama, config, threads=1), head=True, count=2):
            stack.enter_context(closing(engine))
            for number, prompt in enumerate(prompts):
                engine.add(greedy_request(f"g{number}", prompt, 12))
                engine.add(Request(f"p{number}", prompt, penalised))
            results.append(run(engine).tokens)
            assert_at_rest(engine)
    assert results[0] == results[1]
    assert [results[0][f"g{number}"] for number in range(3)] == [greedy(tiny_llama, prompt, 12) for prompt in prompts]


def test_a_file_of_prompts_is_generated_from_on_two_devices(tmp_path: Path) -> None:
    folder, prompt = save_tiny_model(tmp_path / "m"), prompt_of(20)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"id": "a", "prompt_token_ids": prompt, "max_new_tokens": 9}) + "\n")
    files = ["--input", str(source), "--output", str(target)]
    assert main(["--model", str(folder), *files, "--quiet", "--threads", "1", "--tp", "2"]) == 0
    (line,) = map(json.loads, target.read_text().splitlines())
    assert line["token_ids"] == greedy(folder, prompt, 9)
