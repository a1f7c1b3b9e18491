"""Which rank writes which heads to which rank. Pure: two layouts and a seed in, pairs of ranks out.

Ranks that hold all heads between them are a replica set. Each replica set of the target gets one set of the source,
by chance, and within these two sets every overlap of heads is one pair:

    TP 2 -> TP 4, 4 heads           TP 4 -> TP 2, 4 heads           TP 2 -> TP 4, 1 head (or MLA)
    s0 [0 1] --0--> t0              s0 [0] --0--.                   s0 --0--> t1  \\
             --1--> t1              s1 [1] --1--+-> t0 [0 1]        s1 --0--> t0   | each target set: a source set
    s1 [2 3] --2--> t2              s2 [2] --2--.                   s0 --0--> t2   | at random, all of them in turn
             --3--> t3              s3 [3] --3--+-> t1 [2 3]        s1 --0--> t3  /
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.context import refuse_context
from protocol.layout import KVLayout


@dataclass(frozen=True, slots=True)
class RankPair:
    """Rank `source` writes the model's heads `heads` to rank `target`."""

    source: int
    target: int
    heads: range


def refuse_pair(source: KVLayout, target: KVLayout) -> str | None:
    """Why pages of `source` cannot be written into `target`, or None if they can. Page sizes and numbers of ranks may
    differ, what the model says may not; the context must have what the target wants."""
    for side, layout in (("prefill", source), ("decode", target)):
        if problem := layout.problem():
            return f"the {side} side's KV layout is none: {problem}"
    facts = ("groups", "kv_heads", "parts", "head_dim", "dtype")
    unequal = [name for name in facts if getattr(source, name) != getattr(target, name)]
    if not unequal:
        return refuse_context(source.context, target.context)
    name = unequal[0]
    return f"{name} of the KV differ: prefill side {getattr(source, name)}, decode side {getattr(target, name)}"


def assign_sets(source: KVLayout, target: KVLayout, seed: str) -> list[int]:
    """For each replica set of the target the set of the source that writes to it: none twice before all had a turn, so
    that every source rank carries its share."""
    order = random.Random(seed).sample(range(source.replica_sets), source.replica_sets)
    return [order[index % len(order)] for index in range(target.replica_sets)]


def rank_pairs(source: KVLayout, target: KVLayout, assigned: Sequence[int]) -> list[RankPair]:
    """All pairs, for sets as `assign_sets` chose them. Their number and their heads do not depend on that choice."""
    pairs = []
    for target_set, source_set in enumerate(assigned):
        for to in target.replica_set(target_set):
            for by in source.replica_set(source_set):
                heads = _overlap(source.heads_of(by), target.heads_of(to))
                if heads:
                    pairs.append(RankPair(by, to, heads))
    return pairs


def _overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))
