"""How heads and features are divided, and which divisions are refused."""

import pytest
from transformers import DeepseekV3Config, LlamaConfig

from engine.errors import UnsupportedModel
from engine.tensor_parallel import Shard, check_divisible, kv_heads_per_rank

COUNTS = (1, 2, 3, 4, 6, 8)


def of_heads(heads: int, kv_heads: int, features: int = 96) -> LlamaConfig:
    return LlamaConfig(
        num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=features, hidden_size=8 * heads
    )


@pytest.mark.parametrize("world", COUNTS)
@pytest.mark.parametrize("kv_heads", COUNTS)
def test_every_query_head_finds_its_kv_head_on_its_own_rank(world: int, kv_heads: int) -> None:
    heads = 24
    if kv_heads % world and world % kv_heads:
        return
    queries, keys = range(heads), range(kv_heads)
    seen: list[int] = []
    for rank in range(world):
        shard = Shard(rank, world)
        mine, held = queries[shard.part(heads)], keys[shard.kv_heads(kv_heads)]
        assert len(held) == kv_heads_per_rank(kv_heads, world)
        assert {query // (heads // kv_heads) for query in mine} == set(held)
        local = [index // (len(mine) // len(held)) for index in range(len(mine))]
        assert [held[index] for index in local] == [query // (heads // kv_heads) for query in mine]
        seen += mine
    assert seen == list(queries)


def test_latent_vectors_are_every_ranks() -> None:
    config = DeepseekV3Config(num_attention_heads=8, intermediate_size=96, moe_intermediate_size=32)
    check_divisible(config, 8)
    with pytest.raises(UnsupportedModel, match=r"8 query heads, 1 KV heads .* choose --tp 1, 2, 4, 8$"):
        check_divisible(config, 3)


def test_more_ranks_than_kv_heads_hold_neighbouring_copies() -> None:
    assert [Shard(rank, 4).kv_heads(2) for rank in range(4)] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "features", "world", "choices"),
    [(9, 3, 1536, 2, "1, 3"), (8, 4, 96, 3, "1, 2, 4, 8"), (8, 8, 98, 4, "1, 2"), (12, 4, 96, 6, "1, 2, 4, 12")],
)
def test_what_cannot_be_divided_is_refused_with_what_can(
    heads: int, kv_heads: int, features: int, world: int, choices: str
) -> None:
    config = of_heads(heads, kv_heads, features)
    with pytest.raises(UnsupportedModel, match=f"choose --tp {choices}$"):
        check_divisible(config, world)
    for possible in choices.split(", "):
        check_divisible(config, int(possible))
