"""How pages, blocks and chunks follow from a model's layers."""

import pytest

from engine.errors import UnsupportedModel
from engine.geometry import AttentionType, CacheGeometry, LayerGroup, full_geometry, group_layers
from protocol.layout import full_layout

FULL, SLIDING = AttentionType.FULL, AttentionType.SLIDING


def geometry(types: str, window: int = 8, page_size: int = 4, head_dim: int = 8) -> CacheGeometry:
    """Of layers "f" and "s", of one float32 KV head."""
    names = [FULL if letter == "f" else SLIDING for letter in types]
    return CacheGeometry(page_size, 1, head_dim, "float32", group_layers(len(types), names, window))


HYBRID = geometry("sssf")
"""Pages of 256 bytes."""


def test_layers_are_grouped_by_their_type_full_attention_first() -> None:
    types = [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL]
    assert group_layers(6, types, 8) == (LayerGroup(FULL, (2, 5)), LayerGroup(SLIDING, (0, 1, 3, 4), 8))
    types = [FULL, FULL, FULL, SLIDING, FULL, FULL, SLIDING]
    assert group_layers(7, types, 8) == (LayerGroup(FULL, (0, 1, 2, 4, 5)), LayerGroup(SLIDING, (3, 6), 8))


def test_without_types_a_window_makes_all_layers_slide() -> None:
    assert group_layers(3, None, 8) == (LayerGroup(SLIDING, (0, 1, 2), 8),)
    assert group_layers(3, None, None) == (LayerGroup(FULL, (0, 1, 2)),)


def test_of_one_type_there_is_one_group() -> None:
    assert group_layers(2, [FULL, FULL], 8) == (LayerGroup(FULL, (0, 1)),), "a window that no layer uses"
    assert group_layers(2, [SLIDING, SLIDING], 8) == (LayerGroup(SLIDING, (0, 1), 8),)


@pytest.mark.parametrize(
    ("types", "window", "reason"),
    [
        (["full_attention", "linear_attention"], None, "linear_attention"),
        (["chunked_attention", "full_attention"], 8, "chunked_attention"),
        (["sliding_attention"], None, "window of None"),
        (["sliding_attention"], 0, "window of 0"),
    ],
)
def test_other_layers_are_refused(types: list[str], window: int | None, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        group_layers(len(types), types, window)


def test_a_block_has_a_page_of_each_layer_and_a_chunk_whole_blocks_of_every_group() -> None:
    assert HYBRID.page_bytes == 256
    assert HYBRID.block_bytes == (256, 768)
    assert (HYBRID.chunk_bytes, HYBRID.blocks_per_chunk) == (768, (3, 1))


@pytest.mark.parametrize(
    ("types", "chunk_bytes", "blocks_per_chunk"), [("ffs", 512, (1, 2)), ("ffsss", 1536, (3, 2)), ("ff", 512, (1,))]
)
def test_chunks_are_the_least_common_multiple(types: str, chunk_bytes: int, blocks_per_chunk: tuple[int, ...]) -> None:
    found = geometry(types)
    assert (found.chunk_bytes, found.blocks_per_chunk) == (chunk_bytes, blocks_per_chunk)


def test_a_chunk_is_never_less_than_the_alignment() -> None:
    small = geometry("fs", head_dim=1)
    assert (small.page_bytes, small.chunk_bytes, small.blocks_per_chunk) == (32, 128, (4, 4))


@pytest.mark.parametrize(
    ("asked", "chunks", "reported", "cache_tokens"), [(1, 2, 1, 24), (2, 3, 2, 36), (5, 7, 5, 84), (6, 8, 6, 96)]
)
def test_whole_blocks_round_up_to_chunks(asked: int, chunks: int, reported: int, cache_tokens: int) -> None:
    assert HYBRID.chunks_for(asked) == chunks
    assert HYBRID.whole_blocks(chunks) == reported
    assert HYBRID.cache_tokens(chunks) == cache_tokens


def test_more_blocks_may_be_had_than_were_asked_for() -> None:
    uneven = geometry("fsss", head_dim=1, page_size=4)
    chunks = uneven.chunks_for(1)
    assert uneven.whole_blocks(chunks) > 1


def test_a_layout_tells_peers_what_the_pool_looks_like() -> None:
    layout = full_layout(layers=2, kv_heads=1, page_size=4, head_dim=8, dtype="float32")
    assert full_geometry(layout).is_full
    assert full_geometry(layout).layout() == layout
    assert full_geometry(layout) == geometry("ff")


@pytest.mark.parametrize("types", ["sssf", "ss", "fsff"])
def test_a_layouts_sizes_are_the_pools(types: str) -> None:
    ours = geometry(types)
    layout = ours.layout()
    assert ours.is_full == layout.is_full == ("s" not in types)
    assert tuple(layout.block_bytes(group) for group in range(len(layout.groups))) == ours.block_bytes
    for group, layers in enumerate(ours.groups):
        for tokens in range(40):
            assert layout.pages_for(group, tokens) == layers.pages_for(tokens, ours.page_size)


def test_a_rank_of_several_names_the_whole_models_heads() -> None:
    ours = geometry("ff")
    assert ours.layout(tensor_parallel=4).kv_heads == 4 * ours.kv_heads
    assert ours.layout(tensor_parallel=4, kv_heads=2).replica_sets == 2
    with pytest.raises(AssertionError):
        ours.layout(tensor_parallel=2, kv_heads=8)
