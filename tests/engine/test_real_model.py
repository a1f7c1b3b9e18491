"""SmolLM2, real prompts: the tokens of transformers' own greedy `generate`, all at once and disaggregated."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.engine import Engine
from tests.engine.driving import (
    assert_at_rest,
    copy_pages,
    greedy_request,
    model_engine,
    prefill_here,
    run,
)

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

NEW = 4
CHUNK = 64
TEXTS = [
    "Hi",
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Grüße aus Köln! Was ist die Hauptstadt von Österreich?",
    "東京は日本の首都です。大阪は",
    "Привет, как дела? 🙂🙃",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at a temperature of",
]
LENGTHS = [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 20]
LONG_TEXT = (
    "A ferry carries people across the river, and each crossing takes a little longer than the last one did. " * 20
)


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    long: list[int] = tokenizer(LONG_TEXT)["input_ids"]
    return [list(tokenizer(text)["input_ids"]) for text in TEXTS] + [long[:length] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(model_dir, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


@pytest.fixture(scope="module")
def serving(model_dir: Path) -> Engine:
    return model_engine(model_dir, page_size=64, num_blocks=48, max_batch_tokens=CHUNK)


def test_all_at_once(serving: Engine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    for index, prompt in enumerate(prompts):
        serving.add(greedy_request(str(index), prompt, NEW))
    tokens = run(serving).tokens
    assert [tokens[str(index)] for index in range(len(prompts))] == expected
    assert_at_rest(serving)


def test_disaggregated(model_dir: Path, serving: Engine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    prefill = model_engine(model_dir, page_size=64, num_blocks=48, max_batch_tokens=CHUNK, head=False)
    remote = {str(index): prompt for index, prompt in enumerate(prompts) if len(prompt) > 1}
    reserved = {name: serving.reserve(greedy_request(name, prompt, NEW)).tables[0] for name, prompt in remote.items()}
    tables = prefill_here(prefill, remote)
    for name, prompt in remote.items():
        source = tables[name]
        copy_pages(prefill, source, serving, reserved[name][: len(source)])
        prefill.release(name)
        serving.resume(name, computed=len(prompt) - 1)
    tokens = run(serving).tokens
    assert {name: tokens[name] for name in remote} == {name: expected[int(name)] for name in remote}
    assert_at_rest(serving)
    assert_at_rest(prefill)
