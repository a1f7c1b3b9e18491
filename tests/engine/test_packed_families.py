"""Every kind of model that is served, packed batches over tables made by hand, against transformers' own `generate`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.geometry import AttentionType, LayerGroup
from tests.engine.by_hand import ByHand
from tests.engine.tiny_models import KINDS, NEW, WINDOW_PROMPTS, continued, greedy, prompt_of
from tests.tiny_model import WINDOW


def test_batches_of_chunks_and_decodes_give_generates_tokens(any_kind: Path) -> None:
    assert ByHand(any_kind, "ABC").greedy(WINDOW_PROMPTS, NEW, budget=5) == continued(any_kind)


@pytest.mark.parametrize("name", KINDS)
def test_each_layer_is_in_its_group_and_moves_the_word_once(name: str, tiny_kind: Callable[[str], Path]) -> None:
    model = ByHand(tiny_kind(name))
    groups = {group.type: group for group in model.pool.geometry.groups}
    for letter, kind in (("f", AttentionType.FULL), ("s", AttentionType.SLIDING)):
        layers = tuple(layer for layer, each in enumerate(KINDS[name].types) if each == letter)
        window = WINDOW if letter == "s" else None
        assert groups.get(kind) == (LayerGroup(kind, layers, window) if layers else None)
    for tokens, word in ((prompt_of(7), 3), ([1], 6)):
        model.forward({"A": tokens})
        assert model.progress.value == word


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("gemma2", {"softcap": None}),
        ("gpt-oss", {"sinks": None}),
        ("gemma2", {"scaling": 8**-0.5}),
        ("deepseek-v3", {"scaling": 24**-0.5}),
    ],
    ids=["softcap", "sinks", "query_pre_attn_scalar", "mscale_all_dim"],
)
def test_what_a_family_does_to_its_scores_shows_in_the_tokens(
    name: str, left_out: dict[str, float | None], tiny_kind: Callable[[str], Path]
) -> None:
    model = ByHand(tiny_kind(name))
    model.backend.instead = left_out
    assert model.greedy({"A": WINDOW_PROMPTS["B"]}, NEW, 64)["A"] != greedy(tiny_kind(name), WINDOW_PROMPTS["B"], NEW)


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma2", "gpt-oss", "deepseek-v2"])
def test_a_damaged_page_shows_in_the_tokens(name: str, tiny_kind: Callable[[str], Path]) -> None:
    """These models are not blind: one head of one page of one layer, zeroed after prefill."""
    model = ByHand(tiny_kind(name))
    prompt = WINDOW_PROMPTS["B"]
    logits = model.forward({"A": prompt})["A"]
    last = len(model.pool.geometry.groups) - 1
    model.pool.pages(last)[model.tables["A"][last][0], 0, -1] = 0
    tokens = [int(logits.argmax())]
    while len(tokens) < NEW:
        tokens.append(int(model.forward({"A": tokens[-1:]})["A"].argmax()))
    expected = greedy(tiny_kind(name), prompt, NEW)
    assert tokens[0] == expected[0]
    assert tokens != expected


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "qwen3-moe", "deepseek-v3"])
def test_logits_are_those_of_transformers_own_forward(name: str, tiny_kind: Callable[[str], Path]) -> None:
    """Of the wanted rows alone, and Gemma 2's final softcap on them too: greedy tokens would not show it."""
    folder = tiny_kind(name)
    logits = ByHand(folder).forward({"A": WINDOW_PROMPTS["C"]})["A"]
    model = cast(Any, AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(torch.tensor([WINDOW_PROMPTS["C"]])).logits[0, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    cap = getattr(model.config, "final_logit_softcapping", None)
    assert cap is None or logits.abs().max() < cap < 10 * logits.abs().max()


def test_every_family_runs_in_half_precision(any_kind: Path) -> None:
    model = ByHand(any_kind, "AB", dtype="bfloat16")
    for new in ({"A": prompt_of(20)}, {"A": [3], "B": prompt_of(11)}, {"B": [4, 5, 6]}):
        assert all(logits.isfinite().all() for logits in model.forward(new).values())
