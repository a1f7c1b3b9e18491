"""Which ranks meet, who is refused, and how the work of copies is spread."""

from collections import Counter

import msgspec
import pytest

from kv_messenger.sharding import RankPair, assign_sets, rank_pairs, refuse_pair
from protocol.layout import GroupLayout, KVLayout, full_layout

FOUR = full_layout(layers=2, kv_heads=4, page_size=16, head_dim=8, dtype="float32")
ONE = msgspec.structs.replace(FOUR, kv_heads=1)


def over(of: KVLayout, ranks: int) -> KVLayout:
    return msgspec.structs.replace(of, tensor_parallel=ranks)


def pairs(heads: int, source: int, target: int) -> list[tuple[int, int, list[int]]]:
    of = msgspec.structs.replace(FOUR, kv_heads=heads)
    by, to = over(of, source), over(of, target)
    found = rank_pairs(by, to, assign_sets(by, to, "seed"))
    assert all(isinstance(pair, RankPair) for pair in found)
    return [(pair.source, pair.target, list(pair.heads)) for pair in found]


def test_equal_sharding_goes_rank_to_rank() -> None:
    assert pairs(4, 2, 2) == [(0, 0, [0, 1]), (1, 1, [2, 3])]


def test_of_fewer_ranks_on_the_target_each_rebuilds_its_pages_from_several() -> None:
    assert pairs(4, 4, 2) == [(0, 0, [0]), (1, 0, [1]), (2, 1, [2]), (3, 1, [3])]


def test_of_more_ranks_on_the_target_each_takes_its_part() -> None:
    assert pairs(4, 1, 4) == [(0, 0, [0]), (0, 1, [1]), (0, 2, [2]), (0, 3, [3])]


def test_each_copy_on_the_target_is_filled() -> None:
    assert sorted((target, heads) for _, target, heads in pairs(2, 2, 4)) == [(0, [0]), (1, [0]), (2, [1]), (3, [1])]


@pytest.mark.parametrize(("source", "target"), [(8, 8), (8, 2), (2, 8), (4, 8), (3, 4)])
def test_all_copies_on_the_source_share_the_work(source: int, target: int) -> None:
    used = Counter(assign_sets(over(ONE, source), over(ONE, target), "seed"))
    assert max(used.values()) - min(used.values()) <= 1 and len(used) == min(source, target)


def test_the_choice_is_the_seeds_and_is_spread_over_transfers() -> None:
    seeds = [f"request {i}" for i in range(400)]
    chosen, again = (Counter(assign_sets(over(ONE, 8), ONE, seed)[0] for seed in seeds) for _ in range(2))
    assert chosen == again
    assert len(chosen) == 8 and min(chosen.values()) > 20


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"groups": (GroupLayout(layers=(0, 1), window=8),)}, "groups"),
        ({"kv_heads": 8}, "kv_heads"),
        ({"head_dim": 16}, "head_dim"),
        ({"dtype": "float16"}, "dtype"),
        ({"tensor_parallel": 3}, "4 KV heads cannot be spread over 3 ranks"),
        ({"tensor_parallel": 6}, "4 KV heads cannot be spread over 6 ranks"),
        ({"parts": 1}, "latent"),
        ({"groups": (GroupLayout(layers=(0, 0)),)}, "layers"),
        ({"groups": (GroupLayout(layers=(1, 0)),)}, "layers"),
        ({"groups": (GroupLayout(layers=(0, 2)),)}, "layers"),
    ],
)
def test_what_cannot_be_moved_is_refused_with_the_reason(change: dict[str, object], reason: str) -> None:
    other = msgspec.structs.replace(FOUR, **change)
    for refusal in (refuse_pair(FOUR, other), refuse_pair(other, FOUR)):
        assert refusal is not None and reason in refusal


@pytest.mark.parametrize("change", [{"page_size": 64}, {"tensor_parallel": 2}, {"tensor_parallel": 8}])
def test_another_cut_of_the_same_kv_is_no_reason(change: dict[str, object]) -> None:
    other = msgspec.structs.replace(FOUR, **change)
    assert refuse_pair(FOUR, other) is refuse_pair(other, FOUR) is None


def test_the_refusal_names_both_sides() -> None:
    reason = refuse_pair(FOUR, msgspec.structs.replace(FOUR, head_dim=16)) or ""
    assert "prefill side 8" in reason and "decode side 16" in reason
