"""The engine's tokens are transformers' own greedy tokens, however they are batched, chunked and paged."""

from pathlib import Path

import pytest

from tests.engine.driving import assert_at_rest, greedy_request, model_engine, run
from tests.engine.tiny_models import greedy, prompt_of
from tests.tiny_model import save_weights

NEW = 6
CHUNK = 24


def edge_lengths(page_size: int) -> list[int]:
    return sorted({1, 2, page_size - 1, page_size, page_size + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5})


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_one_at_a_time_at_every_edge(tiny_llama: Path, page_size: int) -> None:
    engine = model_engine(tiny_llama, page_size=page_size, max_batch_tokens=CHUNK)
    for length in edge_lengths(page_size):
        prompt = prompt_of(length)
        engine.add(greedy_request(f"r{length}", prompt, NEW))
        assert run(engine).tokens[f"r{length}"] == greedy(tiny_llama, prompt, NEW), f"prompt of {length} tokens"
        assert_at_rest(engine)


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_eight_at_once_with_prompts_and_decodes_mixed(tiny_llama: Path, page_size: int) -> None:
    engine = model_engine(tiny_llama, page_size=page_size, num_blocks=1024 // page_size, max_batch_tokens=CHUNK)
    prompts = {f"r{i}": prompt_of(length, seed=1) for i, length in enumerate([1, 40, 7, 24, 25, 90, 16, 3])}
    for request_id, prompt in prompts.items():
        engine.add(greedy_request(request_id, prompt, 2 * NEW))
    gathered = run(engine)
    assert gathered.tokens == {i: greedy(tiny_llama, prompt, 2 * NEW) for i, prompt in prompts.items()}
    assert_at_rest(engine)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_other_families(tmp_path: Path, family: str) -> None:
    directory = save_weights(tmp_path / family, family)
    engine = model_engine(directory, page_size=4, max_batch_tokens=10)
    prompts = {"long": prompt_of(23), "short": prompt_of(5), "single": prompt_of(1)}
    for request_id, prompt in prompts.items():
        engine.add(greedy_request(request_id, prompt, NEW))
    assert run(engine).tokens == {i: greedy(directory, prompt, NEW) for i, prompt in prompts.items()}
    assert_at_rest(engine)


def test_soft_resets_do_not_change_the_tokens(tiny_llama: Path) -> None:
    engine = model_engine(tiny_llama, page_size=4, num_blocks=8, max_batch_tokens=32)
    prompts = {f"r{i}": prompt_of(8, seed=i) for i in range(3)}
    for request_id, prompt in prompts.items():
        engine.add(greedy_request(request_id, prompt, 12))
    gathered = run(engine)
    assert engine.counters.resets == 2
    assert gathered.tokens == {i: greedy(tiny_llama, prompt, 12) for i, prompt in prompts.items()}
    assert_at_rest(engine)
