"""Every kind of model that is served, through the engine, against transformers' own `generate`: however its requests
are cut, batched, shared, reset or moved out of the way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from tests.engine.driving import Gathered, assert_at_rest, greedy_request, model_engine, run
from tests.engine.tiny_models import KINDS, NEW, WINDOW_PROMPTS, continued, greedy, prompt_of
from tests.tiny_model import save_weights

PAGE_SIZE = 4
TIGHT = {"fff": 14, "ffs": 12, "sss": 8, "ssf": 10}
"""By the types of a model's layers, whole-model blocks in which WINDOW_PROMPTS cannot all grow at once."""
FULL = [name for name, kind in KINDS.items() if kind.types == "fff"]


def engine_of(directory: Path, **settings: Any) -> Engine:
    return model_engine(directory, page_size=PAGE_SIZE, sharing=True, **settings)


def tokens_of(engine: Engine, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """NEW tokens of each, all of them queued at once."""
    for name, prompt in prompts.items():
        engine.add(greedy_request(name, prompt, NEW))
    return dict(run(engine).tokens)


@pytest.mark.parametrize("name", KINDS)
def test_batches_and_sharing_change_no_token(name: str, tiny_kind: Callable[[str], Path]) -> None:
    folder, prompt = tiny_kind(name), WINDOW_PROMPTS["C"]
    engine = engine_of(folder)
    assert tokens_of(engine, WINDOW_PROMPTS) == continued(folder)
    assert tokens_of(engine, {"C again": prompt}) == {"C again": greedy(folder, prompt, NEW)}
    assert_at_rest(engine)
    if name in FULL:
        assert engine.prefix is not None
        assert engine.prefix.counters.hits == (len(prompt) - 1) // PAGE_SIZE
    else:
        assert engine.prefix is None, "a ring forgets what it would share"


@pytest.mark.parametrize("name", KINDS)
def test_neither_does_starting_over_in_small_chunks(name: str, tiny_kind: Callable[[str], Path]) -> None:
    engine = engine_of(tiny_kind(name), num_blocks=TIGHT[KINDS[name].types], max_batch_tokens=5)
    assert tokens_of(engine, WINDOW_PROMPTS) == continued(tiny_kind(name))
    assert engine.counters.resets > 0
    assert_at_rest(engine)


@pytest.mark.parametrize("name", KINDS)
def test_nor_does_waiting_in_host_memory(name: str, tiny_kind: Callable[[str], Path]) -> None:
    engine = engine_of(tiny_kind(name), num_blocks=TIGHT[KINDS[name].types], cpu_offload_space=0.001)
    assert tokens_of(engine, WINDOW_PROMPTS) == continued(tiny_kind(name))
    assert engine.counters.offloads > 0
    assert (engine.counters.restores, engine.counters.resets) == (engine.counters.offloads, 0)
    assert_at_rest(engine)


@pytest.mark.parametrize("space", [0.0, 0.001], ids=["reset", "offloaded"])
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gpt-oss", "deepseek-v3"])
def test_nor_does_scheduling_while_a_forward_runs(name: str, space: float, tiny_kind: Callable[[str], Path]) -> None:
    tight = {"num_blocks": TIGHT[KINDS[name].types], "cpu_offload_space": space}
    engine = engine_of(tiny_kind(name), use_async_batching=True, **tight)
    assert tokens_of(engine, WINDOW_PROMPTS) == continued(tiny_kind(name))
    assert engine.counters.resets + engine.counters.offloads > 0
    assert_at_rest(engine)
    engine.close()


def test_a_window_shorter_than_a_page_takes_one_block_for_life(tmp_path: Path) -> None:
    """P24: all layers slide, and the whole cache has room for two requests however long they are."""
    folder = save_weights(tmp_path, "mistral", sliding_window=3, num_hidden_layers=2)
    prompts = {"A": prompt_of(40), "B": prompt_of(2)}
    engine = model_engine(folder, page_size=8, num_blocks=2)
    for name, prompt in prompts.items():
        engine.add(greedy_request(name, prompt, 10))
    gathered, used = Gathered(), []
    while engine.has_work:
        gathered.take(engine.step())
        used.append(engine.pages_total - engine.pages_free)
    assert gathered.tokens == {name: greedy(folder, prompt, 10) for name, prompt in prompts.items()}
    assert used == [2] * 9 + [0]
