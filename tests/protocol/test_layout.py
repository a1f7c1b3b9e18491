"""Where the heads of a model lie, and how large what each rank holds is."""

import msgspec
import pytest

from protocol.layout import GroupLayout, KVLayout, full_layout

FOUR = full_layout(layers=3, kv_heads=4, page_size=16, head_dim=8, dtype="float32")
HYBRID = msgspec.structs.replace(FOUR, groups=(GroupLayout(layers=(2,)), GroupLayout(layers=(0, 1), window=20)))


def over(ranks: int, heads: int = 4) -> KVLayout:
    return msgspec.structs.replace(FOUR, kv_heads=heads, tensor_parallel=ranks)


@pytest.mark.parametrize(
    ("heads", "ranks", "held"),
    [
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (4, 4, [[0], [1], [2], [3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 3, [[0], [0], [0]]),
    ],
)
def test_heads_are_spread_over_ranks_or_copied_to_several(heads: int, ranks: int, held: list[list[int]]) -> None:
    assert [list(over(ranks, heads).heads_of(rank)) for rank in range(ranks)] == held


@pytest.mark.parametrize(("heads", "ranks", "sets"), [(4, 2, [[0, 1]]), (2, 4, [[0, 2], [1, 3]]), (1, 2, [[0], [1]])])
def test_the_ranks_of_a_set_hold_all_heads_between_them(heads: int, ranks: int, sets: list[list[int]]) -> None:
    layout = over(ranks, heads)
    assert [list(layout.replica_set(index)) for index in range(layout.replica_sets)] == sets
    for members in sets:
        assert [head for rank in members for head in layout.heads_of(rank)] == list(range(heads))


@pytest.mark.parametrize(
    ("ranks", "page_bytes"), [(1, 4 * 2 * 16 * 8 * 4), (2, 2 * 2 * 16 * 8 * 4), (8, 2 * 16 * 8 * 4)]
)
def test_sizes_are_of_one_rank(ranks: int, page_bytes: int) -> None:
    layout = over(ranks)
    assert layout.problem() is None
    assert (layout.page_bytes, layout.block_bytes(0)) == (page_bytes, 3 * page_bytes)


def test_a_latent_vector_is_one_part() -> None:
    latent = msgspec.structs.replace(FOUR, kv_heads=1, parts=1)
    assert latent.problem() is None and latent.page_bytes == 16 * 8 * 4


def test_a_sliding_group_holds_no_more_than_its_window() -> None:
    assert [HYBRID.pages_for(0, tokens) for tokens in (16, 17, 100)] == [1, 2, 7]
    assert [HYBRID.pages_for(1, tokens) for tokens in (16, 17, 20, 100)] == [1, 2, 2, 2]
    assert (HYBRID.layers, HYBRID.is_full, FOUR.is_full) == (3, False, True)
    assert HYBRID.block_bytes(1) == 2 * HYBRID.block_bytes(0)
