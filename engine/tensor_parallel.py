"""How a model's heads and features are divided among ranks, one device each. Pure.

Each rank holds an even part of the query heads and of the MLP's features. KV heads are divided as far as they go; with
more ranks than KV heads, neighbouring ranks hold the same one:

4 KV heads, 2 ranks:   | 0 1 | 2 3 |          2 KV heads, 4 ranks:   | 0 | 0 | 1 | 1 |
"""

from dataclasses import dataclass
from typing import Any

from engine.errors import UnsupportedModel
from engine.models.families import kv_shape


@dataclass(frozen=True)
class Shard:
    """The part of a model that rank `rank` of `world` computes. Rank 0 is the main one."""

    rank: int
    world: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_whole(self) -> bool:
        return self.world == 1

    def part(self, count: int) -> slice:
        """Of `count` things, which the number of ranks divides."""
        share = count // self.world
        return slice(self.rank * share, (self.rank + 1) * share)

    def kv_heads(self, count: int) -> slice:
        """Of the model's `count` KV heads."""
        if count >= self.world:
            return self.part(count)
        head = self.rank // (self.world // count)
        return slice(head, head + 1)


WHOLE = Shard(0, 1)


def kv_heads_per_rank(count: int, world: int) -> int:
    """Of the model's `count` KV heads."""
    return max(1, count // world)


def check_divisible(config: Any, world: int, option: str = "--tp") -> None:
    """`config`: a transformers configuration. Raises UnsupportedModel with what to do instead: `option` says it."""
    if _divides(config, world):
        return
    possible = [str(n) for n in range(1, config.num_attention_heads + 1) if _divides(config, n)]
    raise UnsupportedModel(
        f"a model of {config.num_attention_heads} query heads, {kv_shape(config).heads} KV heads and"
        f" {config.intermediate_size} MLP features cannot be divided among {world} devices: choose {option}"
        f" {', '.join(possible)}"
    )


def _divides(config: Any, world: int) -> bool:
    kv_heads = kv_shape(config).heads
    even = [config.num_attention_heads, config.intermediate_size, getattr(config, "moe_intermediate_size", None) or 0]
    return all(count % world == 0 for count in even) and (kv_heads % world == 0 or world % kv_heads == 0)
