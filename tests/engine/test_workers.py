"""Engines whose ranks are processes: the same tokens and pages as those of one device, through a whole life."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from engine.collective import GlooCollective, rendezvous
from engine.engine import Engine
from engine.errors import DeviceLost, UnsupportedModel
from engine.options import EngineOptions
from engine.request import Request
from engine.tensor_parallel import Shard
from engine.workers.build import build_parallel
from protocol.sampling import SamplingParams
from tests.engine.driving import Gathered, assert_at_rest, greedy_request, model_engine, run
from tests.engine.fake_workers import DEADLINE_S, Stepped, children, open_files, workers_but
from tests.engine.lively import LIVELY, lively_requests, rank_pages
from tests.engine.tiny_models import greedy, prompt_of


@pytest.fixture(scope="module")
def engines(tiny_llama: Path) -> Iterator[list[Engine]]:
    """Of two ranks each. The first one's main rank is this process."""
    warm_up_gloo()
    files, before = open_files(), children()
    built = build_parallel(EngineOptions(tiny_llama, LIVELY, threads=1, tp=2), head=True, engines=2)
    yield built
    for engine in built:
        engine.close()
    assert children() == before
    assert {name for name in open_files() - files if "kvferry-pages" not in name} == set()


def warm_up_gloo() -> None:
    """What it opens once in a process, it keeps."""
    meeting = rendezvous()
    with closing(GlooCollective(meeting.port, Shard(0, 1), DEADLINE_S)) as collective:
        collective.join()


@pytest.fixture(params=["local", "remote"])
def engine(request: pytest.FixtureRequest, engines: list[Engine]) -> Engine:
    """Whose main rank is here, or a worker."""
    return engines[0 if request.param == "local" else 1]


def test_a_whole_life_gives_the_tokens_of_one_device(engine: Engine, tiny_llama: Path) -> None:
    alone = model_engine(tiny_llama, page_size=4, num_blocks=400, max_batch_tokens=400)
    gathered, expected = Gathered(), Gathered()
    for one, results in ((engine, gathered), (alone, expected)):
        for request in lively_requests():
            one.add(request)
        run(one, results)
    assert gathered.tokens == expected.tokens
    counters, prefix = engine.counters, engine.prefix_counters
    assert counters.offloads and counters.restores and counters.resets, "the life was too quiet"
    assert prefix.hits, "no prefix was hit"
    assert_at_rest(engine)


def test_greedy_tokens_are_those_of_generate(engine: Engine, tiny_llama: Path) -> None:
    prompts = {name: prompt_of(length, seed=9) for name, length in (("a", 1), ("b", 11), ("c", 40))}
    for name, prompt in prompts.items():
        engine.add(greedy_request(name, prompt, 15))
    gathered = run(engine)
    assert gathered.tokens == {name: greedy(tiny_llama, prompt, 15) for name, prompt in prompts.items()}
    assert_at_rest(engine)


def test_sequences_of_one_prompt_are_forked_on_every_rank(engine: Engine, tiny_llama: Path) -> None:
    alone = model_engine(tiny_llama, page_size=4)
    sampling = SamplingParams(max_new_tokens=8, temperature=1.0, seed=3)
    found = []
    for one in (engine, alone):
        one.add(Request("f", prompt_of(10, seed=4), sampling, n=3))
        found.append(run(one).tokens)
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0].values()}) == 3


def test_every_ranks_pages_are_mapped_here_at_the_addresses_it_reports(engine: Engine, tiny_llama: Path) -> None:
    whole = model_engine(tiny_llama, page_size=4, num_blocks=64, max_batch_tokens=64)
    prompt, pages = prompt_of(16, seed=5), []
    for one in (whole, engine):
        gathered = Gathered()
        one.add(greedy_request("p", prompt, 2))
        gathered.take(one.step())
        table = next(iter(one._lives.requests.values())).tables[0][:4]
        pages.append(torch.cat([rank_pages(one, rank, table) for rank in range(len(one.pools))], dim=2))
        run(one, gathered)
    torch.testing.assert_close(pages[1], pages[0], rtol=1e-4, atol=1e-4)
    assert engine.layout.tensor_parallel == 2
    assert engine.layout.kv_heads == whole.layout.kv_heads == 4
    assert engine.layout.page_bytes * 2 == whole.layout.page_bytes


def test_the_word_counts_each_layer_once_however_many_ranks_there_are(engine: Engine) -> None:
    before = engine.progress.value
    engine.add(greedy_request("w", prompt_of(10), 3))
    assert run(engine).steps == 3
    assert engine.progress.value == before + 3 * 3


def test_a_model_that_cannot_be_divided_starts_no_process(tiny_kind: Callable[[str], Path]) -> None:
    before = children()
    with pytest.raises(UnsupportedModel, match="cannot be divided among 3 devices: choose --tp 1, 2, 4, 8"):
        build_parallel(EngineOptions(tiny_kind("llama"), LIVELY, threads=1, tp=3), head=True)
    assert children() == before


def test_the_engine_ends_with_a_worker_in_a_forward(tiny_llama: Path) -> None:
    """A stopped worker keeps the forward under way until it is killed."""
    before = children()
    (engine,) = build_parallel(EngineOptions(tiny_llama, LIVELY, threads=1, tp=2), head=True)
    with closing(engine):
        worker = workers_but(before)["engine 0 rank 1"]
        os.kill(worker, signal.SIGSTOP)
        engine.add(greedy_request("x", prompt_of(10), 3))
        step = Stepped(engine)
        step.start()
        os.kill(worker, signal.SIGKILL)
        assert step.ended() == f"engine 0 rank 1 (process {worker}) was killed by SIGKILL"
        with pytest.raises(DeviceLost, match="was killed by SIGKILL"):
            engine.step()
    assert children() == before
