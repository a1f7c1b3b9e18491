"""Which models are taken, which are refused and why, and how the progress word moves while one runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from engine.attention.torch_paged import TorchPagedAttention
from engine.cache_pool import CachePool
from engine.errors import IncompleteModel, UnsupportedModel
from engine.forward_batch import BatchRow, ForwardBatch
from engine.kv_cache import PagedKVCache
from engine.model_runner import ModelRunner
from engine.models.binding import BoundModel
from engine.models.families import check_supported, layer_types, window
from engine.models.loading import load_model
from engine.progress import ProgressWord
from engine.tensor_parallel import Shard
from tests.engine.driving import model_engine, prefill_here, prefill_request
from tests.engine.tiny_models import prompt_of
from tests.tiny_model import save_weights


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def naming(config: Any, **fields: Any) -> Any:
    """`config` with fields that are not of its class: a file may hold any."""
    for name, value in fields.items():
        setattr(config, name, value)
    return config


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(), "family is not one of deepseek_v2, .*, gemma2, gemma3_text, gpt_oss, llama"),
        (naming(GPT2Config(), kv_lora_rank=512), "family"),
        (Gemma3Config(), "multimodal.* of type 'gemma3_text', could be"),
        (Qwen3NextConfig(), "family"),
        (Qwen3Config(layer_types=["linear_attention"] * 32), "linear_attention, only full_attention and sliding"),
        (Qwen3Config(layer_types=["chunked_attention"] * 32), "chunked_attention"),
        (Qwen3Config(layer_types=["sliding_attention"] * 32), "window of None"),
        (MistralConfig(sliding_window=0), "sliding window of 0 tokens"),
        (naming(LlamaConfig(), sliding_window=128), "sliding window of 128 tokens, which .* not heed"),
        (naming(LlamaConfig(), layer_types=["sliding_attention"] * 32), "not heed"),
        (Gemma2Config(use_bidirectional_attention=True), "bidirectional"),
        (LlamaConfig(rope_parameters=DYNAMIC), "dynamic"),
        (Gemma3TextConfig(rope_parameters={"full_attention": DYNAMIC}), "dynamic"),
        (naming(GptOssConfig(), quantization_config={"quant_method": "mxfp4"}), r"quantized \(mxfp4\)"),
    ],
)
def test_models_that_would_be_computed_wrongly_are_refused_with_the_reason(config: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        check_supported(config)


@pytest.mark.parametrize(
    ("config", "types", "tokens"),
    [
        (LlamaConfig(), None, None),
        (DeepseekV2Config(), None, None),
        (DeepseekV3Config(), None, None),
        (MistralConfig(sliding_window=None), None, None),
        (MistralConfig(sliding_window=4096), None, 4096),
        (Qwen2Config(num_hidden_layers=2, sliding_window=4096), ("full_attention", "full_attention"), None),
        (
            Qwen2Config(num_hidden_layers=2, use_sliding_window=True, sliding_window=64, max_window_layers=1),
            ("full_attention", "sliding_attention"),
            64,
        ),
        (Qwen3MoeConfig(sliding_window=64), None, None),
        (Qwen3MoeConfig(use_sliding_window=True, sliding_window=64), None, 64),
        (Gemma2Config(num_hidden_layers=2), ("sliding_attention", "full_attention"), 4096),
        (Gemma3TextConfig(num_hidden_layers=6), (*["sliding_attention"] * 5, "full_attention"), 4096),
        (GptOssConfig(num_hidden_layers=2), ("sliding_attention", "full_attention"), 128),
    ],
)
def test_layers_slide_where_the_family_says_so(config: Any, types: tuple[str, ...] | None, tokens: int | None) -> None:
    check_supported(config)
    assert (layer_types(config), window(config)) == (types, tokens)


def test_a_mistral_with_layer_types_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    directory = save_weights(tmp_path / "m", "ministral", sliding_window=8)
    types = ["full_attention", "sliding_attention", "full_attention"]
    edit_config(directory, model_type="mistral", layer_types=types)
    assert load_model(directory).layer_types == tuple(types)


def test_a_refusal_comes_before_the_weights_are_read(tmp_path: Path) -> None:
    directory = save_weights(tmp_path / "m", "mistral")
    edit_config(directory, sliding_window=0)
    (directory / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UnsupportedModel, match="sliding window of 0"):
        load_model(directory)


def test_an_incomplete_directory_is_refused_by_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(IncompleteModel, match="nowhere: no such folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(IncompleteModel, match=r"config\.json, model\.safetensors"):
        load_model(tmp_path)
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "part-1.safetensors").write_bytes(b"")
    with pytest.raises(IncompleteModel, match=r"lacks part-2\.safetensors"):
        load_model(tmp_path)


def test_weights_that_lack_a_tensor_are_refused_rather_than_made_up(tmp_path: Path) -> None:
    directory = save_weights(tmp_path / "m")
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IncompleteModel, match=r"layers\.1\.mlp\.up_proj"):
        load_model(directory)


def test_end_tokens_come_from_both_configurations(tmp_path: Path) -> None:
    directory = save_weights(tmp_path / "m")
    edit_config(directory, eos_token_id=3)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert load_model(directory).eos_token_ids == {3, 5, 7}


def test_without_a_head_only_the_base_model_is_loaded(tiny_llama: Path) -> None:
    names = [name for name, _ in load_model(tiny_llama, head=False).model.named_parameters()]
    assert names
    assert not any("lm_head" in name for name in names)


def test_the_layout_is_the_models(tiny_llama: Path) -> None:
    layout = load_model(tiny_llama).geometry(page_size=16).layout()
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.dtype) == (3, 4, 8, "float32")


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_where_heads_are_made_from_latents_a_token_has_one_vector_on_every_rank(
    tensor_parallel: int, tiny_kind: Callable[[str], Path]
) -> None:
    loaded = load_model(tiny_kind("deepseek-v3"), shard=Shard(0, tensor_parallel))
    layout = loaded.geometry(page_size=16).layout(tensor_parallel, loaded.kv.heads)
    assert (layout.parts, layout.kv_heads, layout.head_dim) == (1, 1, 16 + 8)
    assert layout.page_bytes == 16 * (16 + 8) * 4
    assert layout.replica_sets == tensor_parallel
    assert layout.problem() is None


def test_the_word_advances_once_per_layer_and_forward(tiny_llama: Path) -> None:
    engine = model_engine(tiny_llama, max_batch_tokens=8, head=False)
    address = engine.progress.address
    engine.add(prefill_request("P", prompt_of(20)))
    values = []
    while engine.has_work:
        engine.step()
        values.append(engine.progress.value)
    assert values == [3, 6, 9]
    assert engine.progress.address == address
    assert address % 4096 == 0


def test_a_layers_kv_is_in_its_page_when_the_word_says_so(tiny_llama: Path) -> None:
    loaded = load_model(tiny_llama, head=False)
    pool = CachePool(loaded.geometry(16), 2, debug_pages=True)
    block = pool.take()
    seen: list[torch.Tensor] = []

    class Watched(ProgressWord):
        def advance(self) -> None:
            super().advance()
            seen.append(pool.pages(0)[block, self.value - 1].clone())

    backend = TorchPagedAttention(PagedKVCache(pool), torch.float32)
    runner = ModelRunner(BoundModel(loaded.model, backend, Watched()), backend)
    assert runner.launch(ForwardBatch([BatchRow("P", 0, prompt_of(16), [[block]], None)])).result().tokens == []
    assert len(seen) == 3
    for layer, page in enumerate(seen):
        assert not page.isnan().any(), f"layer {layer} was not written yet"
        assert torch.equal(page, pool.pages(0)[block, layer])


def test_prefill_writes_the_same_bytes_however_it_is_chunked(tiny_llama: Path) -> None:
    """To float32's rounding: the values, slot by slot."""
    pages = []
    for chunk in (7, 64):
        engine = model_engine(tiny_llama, page_size=4, max_batch_tokens=chunk, head=False)
        table = prefill_here(engine, {"P": prompt_of(25)})["P"]
        pages.append(engine.pool.pages(0)[table].clone())
    torch.testing.assert_close(pages[0], pages[1], rtol=1e-4, atol=1e-5)


def test_weights_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    directory = save_weights(tmp_path / "m")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(IncompleteModel, match="cannot be read"):
        load_model(directory)
