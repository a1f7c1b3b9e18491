"""Llama and its kin through our own kernels, beside transformers' modules: the same states, KV and tokens."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.torch_paged import TorchPagedAttention
from engine.cache_pool import CachePool
from engine.errors import KernelsUnavailable
from engine.forward_batch import BatchRow, ForwardBatch
from engine.kv_cache import PagedKVCache
from engine.models import choice
from engine.models.base import ServedModel
from engine.models.binding import BoundModel
from engine.models.choice import choose_model
from engine.models.dense import DenseKernels
from engine.models.llama_like import LlamaLikeModel, why_not
from engine.models.loading import LoadedModel, load_model
from engine.progress import ProgressWord
from tests.engine.paged import PAGE_SIZE, Paged, randomise_vectors
from tests.engine.tiny_models import greedy, prompt_of
from tests.tiny_model import save_weights

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Model:
    family: str
    settings: dict[str, Any] = field(default_factory=dict)


MODELS = {
    "llama": Model("llama"),
    "llama with biases": Model("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with stretched positions": Model("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, tied, of odd sizes": Model(
        "llama", {"tie_word_embeddings": True, "intermediate_size": 100, "vocab_size": 103}
    ),
    "mistral": Model("mistral"),
    "qwen2": Model("qwen2"),
    "qwen3": Model("qwen3"),
    "qwen3 of one KV head": Model("qwen3", {"num_key_value_heads": 1, "head_dim": 24}),
}


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = MODELS[request.param]
    folder = save_weights(tmp_path_factory.mktemp("model"), model.family, **model.settings)
    randomise_vectors(folder)
    return folder


def by_kernels(model: torch.nn.Module, backend: Any, progress: ProgressWord) -> ServedModel:
    return LlamaLikeModel(model, backend, progress, DenseKernels())


FORWARDS = [[(0, 9), (0, 1), (0, 16)], [(9, 10), (1, 14), (16, 17)], [(10, 11), (14, 15), (17, 30)]]
"""Fresh rows, chunks and decodes in one batch."""


def test_states_logits_and_kv_are_those_of_the_modules(directory: Path) -> None:
    plain, fast = Paged(load_model(directory), BoundModel), Paged(load_model(directory), by_kernels)
    for cuts in FORWARDS:
        torch.testing.assert_close(fast.hidden(cuts), plain.hidden(cuts), rtol=1e-4, atol=1e-4)
        rows = [0, sum(end - start for start, end in cuts) - 1]
        torch.testing.assert_close(fast.logits(cuts, rows), plain.logits(cuts, rows), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast.pool.pages(0), plain.pool.pages(0), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_kv_is_written_where_no_states_are_wanted(tiny_llama: Path) -> None:
    silent, whole = (Paged(load_model(tiny_llama), by_kernels) for _ in range(2))
    assert not silent.logits(FORWARDS[0], []).numel()
    whole.hidden(FORWARDS[0])
    torch.testing.assert_close(silent.pool.pages(0), whole.pool.pages(0), rtol=0, atol=0, equal_nan=True)


def test_greedy_tokens_are_those_of_generate(directory: Path) -> None:
    prompt, paged = prompt_of(11), Paged(load_model(directory), by_kernels)
    tokens, start = list(prompt), 0
    while len(tokens) < 30:
        row = BatchRow("A", start, tokens[start:], [paged.tables[0]])
        plan, positions = paged.backend.plan(ForwardBatch([row])), torch.arange(start, len(tokens))
        last = torch.tensor([len(row.tokens) - 1])
        with torch.inference_mode():
            logits = paged.model.logits(torch.tensor(row.tokens), positions, plan, last)
        start = len(tokens)
        tokens.append(int(logits[0].argmax()))
    assert tokens[len(prompt) :] == greedy(directory, prompt, 30 - len(prompt))


def test_a_model_without_a_head_gives_states(tiny_llama: Path) -> None:
    headless, whole = (Paged(load_model(tiny_llama, head=head), by_kernels) for head in (False, True))
    assert torch.equal(headless.hidden(FORWARDS[0]), whole.hidden(FORWARDS[0]))


def test_a_layers_kv_is_in_its_page_when_the_word_says_so(tiny_llama: Path) -> None:
    seen: list[torch.Tensor] = []

    class Watched(ProgressWord):
        def advance(self) -> None:
            super().advance()
            seen.append(paged.pool.pages(0)[Paged.tables[0][:4], self.value - 1].clone())

    def watched(model: torch.nn.Module, backend: Any, _: ProgressWord) -> ServedModel:
        return by_kernels(model, backend, Watched())

    paged = Paged(load_model(tiny_llama), watched)
    paged.hidden([(0, 16)])
    assert len(seen) == 3
    for layer, pages in enumerate(seen):
        assert not pages.isnan().any(), f"layer {layer} was not written yet"
        assert torch.equal(pages, paged.pool.pages(0)[Paged.tables[0][:4], layer])


def chosen(loaded: LoadedModel) -> tuple[str, str]:
    """The class that serves, and why."""
    backend = TorchPagedAttention(PagedKVCache(CachePool(loaded.geometry(PAGE_SIZE), 1)), torch.float32)
    model, why = choose_model(loaded.model, backend, ProgressWord())
    return type(model).__name__, why


def test_the_kernels_are_chosen_where_they_cover_the_model(directory: Path) -> None:
    name, why = chosen(load_model(directory))
    assert name == "LlamaLikeModel"
    assert why in ("C kernels, portable", "C kernels, avx2", "C kernels, avx512")


@pytest.mark.parametrize(
    ("kind", "reason"), [("gemma2", "models of type gemma2"), ("qwen3-moe", "models of type qwen3_moe")]
)
def test_other_families_run_through_their_modules(tiny_kind: Callable[[str], Path], kind: str, reason: str) -> None:
    assert chosen(load_model(tiny_kind(kind))) == (
        "BoundModel",
        f"transformers' modules: the C kernels do not cover {reason}",
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"hidden_act": "gelu"}, "the activation gelu"), ({"intermediate_size": 98}, "widths of 64, 98 and 8")],
)
def test_what_the_kernels_do_not_cover_is_named(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    assert why_not(load_model(save_weights(tmp_path, **settings)).model) == reason


def test_other_types_of_numbers_run_through_the_modules(tiny_llama: Path) -> None:
    assert why_not(load_model(tiny_llama, "bfloat16").model) == "torch.bfloat16 on cpu"


def test_without_the_extension_the_modules_serve(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent() -> DenseKernels:
        raise KernelsUnavailable("no compiler was here")

    monkeypatch.setattr(choice, "DenseKernels", absent)
    with caplog.at_level(logging.WARNING):
        assert chosen(load_model(tiny_llama)) == ("BoundModel", "transformers' modules: no compiler was here")
    assert "slower: no compiler was here" in caplog.text
