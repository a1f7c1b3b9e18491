"""A real model with sliding layers, past its window: the tokens of transformers' own greedy `generate`.

There is none whose terms allow it to be fetched by default. KVFERRY_HYBRID_MODEL names a folder of one (float32
safetensors with a tokenizer, such as Gemma-3-270M's); without it this is skipped.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.models.loading import load_model
from tests.engine.driving import assert_at_rest, greedy_request, model_engine, run
from tests.engine.tiny_models import greedy

VARIABLE = "KVFERRY_HYBRID_MODEL"
TEXT = "".join(f"Ferry {n} left pier {n * 7 % 13} at {n % 24} o'clock with {n * n % 97} cars. " for n in range(400))
NEW = 12

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder() -> Path:
    name = os.environ.get(VARIABLE)
    if not name:
        pytest.skip(f"{VARIABLE} names no folder of a model with sliding layers")
    return Path(name)


def test_a_real_hybrid_model_gives_generates_tokens_around_its_window(folder: Path) -> None:
    window = load_model(folder).window
    assert window is not None, f"{folder} has no sliding layers"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = tokenizer(TEXT)["input_ids"]
    lengths = (5, window - NEW // 2, window + 5, 2 * window + 100)
    assert len(ids) > lengths[-1]
    engine = model_engine(folder, num_blocks=256, max_batch_tokens=200)
    for length in lengths:
        engine.add(greedy_request(str(length), ids[:length], NEW))
    assert run(engine).tokens == {str(length): greedy(folder, ids[:length], NEW) for length in lengths}
    assert_at_rest(engine)
