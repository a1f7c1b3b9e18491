"""How many chunks fit, by the specification's numbers; and that explicit sizes win or fail loudly."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV3Config, Gemma2Config, GptOssConfig, LlamaConfig, Qwen3MoeConfig

from engine.geometry import AttentionType, CacheGeometry, LayerGroup
from engine.sizing import (
    GIB,
    MemoryBudget,
    MemoryUse,
    ModelSizes,
    choose_chunks,
    default_memory_share,
    offload_chunks,
)

TWO_LAYERS = CacheGeometry(
    16, kv_heads=2, head_dim=16, dtype="float16", groups=(LayerGroup(AttentionType.FULL, (0, 1)),)
)
HYBRID = CacheGeometry(
    page_size=4,
    kv_heads=1,
    head_dim=8,
    dtype="float32",
    groups=(LayerGroup(AttentionType.FULL, (3,)), LayerGroup(AttentionType.SLIDING, (0, 1, 2), window=8)),
)
HEAD = 64 * 2 + 1000 * 4
QKV = 2 * (64 + 4 * 16 + 2 * 2 * 16)
USE = MemoryUse(TWO_LAYERS, head=HEAD, layer=QKV, gathered=2 * (2 * 2) * 16)
"""Hidden 64, 1000 tokens, 4 heads, of 2 bytes each, by the specification's formula: 2 * kv_heads are gathered."""
WITHOUT_FLASH = dataclasses.replace(USE, gathered=2 * (2 * 4 + 2) * 16, pair=2)
TEN_MB = MemoryBudget(10_000_000, 1.0)


def test_the_terms_of_the_formula() -> None:
    assert (TWO_LAYERS.page_bytes, TWO_LAYERS.chunk_bytes) == (2048, 4096)
    assert (USE.per_token, WITHOUT_FLASH.per_token) == (4176, 4176)
    assert [use.per_chunk + use.chunk_tokens * use.gathered for use in (USE, WITHOUT_FLASH)] == [6272, 9344]


def test_1252_chunks_fit_with_flash_attention() -> None:
    assert choose_chunks(USE, TEN_MB, 512, None) == 1252


def test_284_chunks_fit_where_masks_are_built() -> None:
    assert choose_chunks(WITHOUT_FLASH, TEN_MB, 512, None) == 284
    assert WITHOUT_FLASH.footprint(512, 284) == 9_977_344


@given(
    st.integers(0, 40_000_000),
    st.integers(1, 1200),
    st.sampled_from([0, 2, 15]),
    st.booleans(),
    st.sampled_from([TWO_LAYERS, HYBRID]),
    st.sampled_from([None, 100, 5000]),
)
def test_what_is_chosen_fits_and_one_more_chunk_would_not(
    budget: int, batch_tokens: int, pair: int, asynchronous: bool, geometry: CacheGeometry, longest: int | None
) -> None:
    use = dataclasses.replace(USE, geometry=geometry, pair=pair, asynchronous=asynchronous, longest=longest)
    chunks = use.chunks_within(budget, batch_tokens)
    assert not chunks or use.footprint(batch_tokens, chunks) <= budget
    assert use.footprint(batch_tokens, chunks + 1) > budget


def test_rows_attended_to_one_by_one_are_gathered_and_masked_one_by_one() -> None:
    short = dataclasses.replace(WITHOUT_FLASH, longest=512)
    more = short.footprint(512, 301) - short.footprint(512, 300)
    assert more == short.per_chunk


def test_a_models_own_numbers_are_taken_from_its_configuration() -> None:
    config = Qwen3MoeConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=1000)
    config.update({"moe_intermediate_size": 48, "num_experts_per_tok": 8, "max_position_embeddings": 512})
    sizes = ModelSizes.of(config)
    assert sizes == ModelSizes(64, 8 * 48, 4, 1000, 512, plain_scores=False)
    use = sizes.on_cuda(TWO_LAYERS, max_requests=3, asynchronous=False, workspace=7)
    assert use.fixed == 2 * 4096 + 3 * HEAD + 7, "the head sees three rows"
    assert (use.layer, use.gathered, use.pair) == (2 * (2 * 64 + 3 * 8 * 48), 128, 0)


def test_latent_vectors_are_expanded_for_all_rows_at_once() -> None:
    config = DeepseekV3Config(num_attention_heads=4, kv_lora_rank=24, qk_nope_head_dim=16, v_head_dim=12)
    config.update({"qk_rope_head_dim": 8, "max_position_embeddings": 512})
    sizes = ModelSizes.of(config)
    assert sizes.expanded == (16 + 12) + 2 * (16 + 8), (
        "the projection's K and V; keys with their rotary part, and as wide V"
    )
    latents = dataclasses.replace(TWO_LAYERS, kv_heads=1, head_dim=32, parts=1)
    use = sizes.on_cpu(latents, max_requests=3, asynchronous=False)
    assert use.gathered == 2 * (2 * 32 + 4 * sizes.expanded)
    more = use.footprint(64, 301) - use.footprint(64, 300)
    assert more == use.per_chunk + use.chunk_tokens * use.gathered, "masks are of the longest row alone"
    assert sizes.divided(2).on_cpu(latents, 3, asynchronous=False).gathered == 2 * (2 * 32 + 2 * sizes.expanded)


def test_softcaps_and_sinks_keep_every_heads_scores_on_a_cpu() -> None:
    plain, gemma, gpt = (
        ModelSizes.of(config).on_cpu(TWO_LAYERS, max_requests=3, asynchronous=False).pair
        for config in (LlamaConfig(num_attention_heads=4), Gemma2Config(num_attention_heads=4), GptOssConfig())
    )
    assert plain == 2 + 9
    assert gemma == plain + 4 * 4 * 4
    assert gpt == plain + 4 * 4 * 64


def test_explicit_blocks_win_over_what_would_fit() -> None:
    assert choose_chunks(USE, TEN_MB, 512, 7) == 7
    assert choose_chunks(dataclasses.replace(USE, geometry=HYBRID), TEN_MB, 512, 5) == HYBRID.chunks_for(5) == 7


def test_explicit_sizes_that_do_not_fit_say_what_would() -> None:
    with pytest.raises(
        MemoryError, match=r"num_blocks 2000 .* 9\.54 MiB \(1 of 9\.54 MiB available\): lower num_blocks to 1252,"
    ):
        choose_chunks(USE, TEN_MB, 512, 2000)
    with pytest.raises(MemoryError, match="max_batch_tokens"):
        choose_chunks(USE, TEN_MB, 10_000, 2000)
    with pytest.raises(MemoryError, match="lower max_batch_tokens"):
        choose_chunks(USE, TEN_MB, 10_000, None)


@pytest.mark.parametrize(("batch_tokens", "num_blocks"), [(0, None), (-1, 5), (512, 0)])
def test_sizes_below_one_are_refused(batch_tokens: int, num_blocks: int | None) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        choose_chunks(USE, TEN_MB, batch_tokens, num_blocks)


def test_the_share_of_memory_depends_on_the_device() -> None:
    assert [default_memory_share(kind) for kind in ("cpu", "mps", "cuda")] == [0.6, 0.6, 0.8]
    assert MemoryBudget(1000, 0.6).bytes == 600


def test_host_memory_for_offloading_is_capped_by_a_share_of_what_is_available() -> None:
    available = 10 * GIB
    chunk = TWO_LAYERS.chunk_bytes
    assert offload_chunks(0.0, 0.8, available, TWO_LAYERS) == 0
    assert offload_chunks(1.0, 0.8, available, TWO_LAYERS) == GIB // chunk
    assert offload_chunks(9.0, 0.8, available, TWO_LAYERS) == offload_chunks(None, 0.8, available, TWO_LAYERS)
    assert offload_chunks(None, 0.8, available, TWO_LAYERS) == 8 * GIB // chunk
    assert offload_chunks(9.0, 1.0, available, TWO_LAYERS) == 9 * GIB // chunk
    assert offload_chunks(None, 0.0, available, TWO_LAYERS) == 0


def test_host_memory_is_cut_to_whole_chunks() -> None:
    three_and_a_half = 3.5 * TWO_LAYERS.chunk_bytes / GIB
    assert offload_chunks(three_and_a_half, 0.8, GIB, TWO_LAYERS) == 3
    assert offload_chunks(TWO_LAYERS.chunk_bytes / GIB / 2, 0.8, GIB, TWO_LAYERS) == 0
