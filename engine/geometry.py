"""How a model's KV is cut up: page < block < chunk. Pure arithmetic.

page    page_size tokens of K and V of one layer (or, with MLA, of its one latent vector)
block   one page for each layer of a group (the layers of one attention type)
chunk   the pool's unit: a whole number of blocks of every group, so that a free chunk can serve any of them

1 full + 3 sliding layers:   chunk |  page  |  page  |  page  |
                        as full    | block0 | block1 | block2 |
                        as sliding | block0 ................. |
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal

from engine.errors import UnsupportedModel
from protocol.layout import ITEM_SIZES, DType, GroupLayout, KVLayout

ALIGNMENT = 128
"""Bytes: chunks begin at multiples of it."""
READ_PADDING_CHUNK = 0
"""Always zero: padded rows read it."""
WRITE_PADDING_CHUNK = 1
"""Padded rows write here; nobody reads it."""
RESERVED_CHUNKS = 2
UNBOUNDED = 1 << 62
"""Tokens that a full ring holds: as many as may come."""


class AttentionType(StrEnum):
    """By the names of transformers' `layer_types`."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"


@dataclass(frozen=True)
class LayerGroup:
    """The model's layers of one attention type, ascending. `window`: tokens that a query sees, itself included; None
    for full attention."""

    type: AttentionType
    layers: tuple[int, ...]
    window: int | None = None

    def pages_for(self, tokens: int, page_size: int) -> int:
        """Pages, in each layer, of a request with `tokens` tokens in KV: a sliding group keeps a ring of its window."""
        return -(-(tokens if self.window is None else min(tokens, self.window)) // page_size)


def group_layers(count: int, types: Sequence[str] | None, window: int | None) -> tuple[LayerGroup, ...]:
    """Full attention first. Without `types`, all layers slide if there is a `window`. Raises UnsupportedModel."""
    if types is None:
        types = [AttentionType.FULL if window is None else AttentionType.SLIDING] * count
    unknown = sorted(set(types) - set(AttentionType))
    if unknown:
        raise UnsupportedModel(f"layers of type {', '.join(unknown)} cannot be served, only {', '.join(AttentionType)}")
    groups = []
    for kind in AttentionType:
        layers = tuple(layer for layer, name in enumerate(types) if name == kind)
        if not layers:
            continue
        if kind is AttentionType.SLIDING and (window is None or window < 1):
            raise UnsupportedModel(f"sliding layers with a window of {window} tokens: it must be at least 1")
        groups.append(LayerGroup(kind, layers, window if kind is AttentionType.SLIDING else None))
    return tuple(groups)


@dataclass(frozen=True)
class CacheGeometry:
    """Sizes in bytes unless a name says otherwise. Lists by group are in the order of `groups`. `parts`: 2, K and V; or
    1, a latent vector that all heads are made from."""

    page_size: int
    kv_heads: int
    head_dim: int
    dtype: DType
    groups: tuple[LayerGroup, ...]
    parts: Literal[1, 2] = 2

    @cached_property
    def page_bytes(self) -> int:
        return self.parts * self.kv_heads * self.head_dim * ITEM_SIZES[self.dtype] * self.page_size

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        return tuple(self.page_bytes * len(group.layers) for group in self.groups)

    @cached_property
    def chunk_bytes(self) -> int:
        return math.lcm(ALIGNMENT, *self.block_bytes)

    @cached_property
    def blocks_per_chunk(self) -> tuple[int, ...]:
        return tuple(self.chunk_bytes // block for block in self.block_bytes)

    @property
    def layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def is_full(self) -> bool:
        """Full attention in every layer: only then can blocks be shared."""
        return all(group.type is AttentionType.FULL for group in self.groups)

    def chunks_for(self, num_blocks: int) -> int:
        """Chunks that hold `num_blocks` blocks of the whole model (`page_size` tokens in every layer)."""
        return max(1, -(-num_blocks * sum(self.block_bytes) // self.chunk_bytes))

    def whole_blocks(self, chunks: int) -> int:
        """Blocks of the whole model that `chunks` chunks hold; may be more than was asked of `chunks_for`."""
        return chunks * self.chunk_bytes // sum(self.block_bytes)

    def cache_tokens(self, chunks: int) -> int:
        """The cache budget: tokens that the group with the smallest blocks would hold if it owned every chunk."""
        return self.page_size * chunks * max(self.blocks_per_chunk)

    def fits(self, tokens: int, chunks: int) -> bool:
        """Whether one request of `tokens` tokens fits into `chunks` chunks."""
        pairs = zip(self.groups, self.blocks_per_chunk, strict=True)
        return sum(-(-group.pages_for(tokens, self.page_size) // blocks) for group, blocks in pairs) <= chunks

    def max_tokens(self, chunks: int) -> int:
        """The most that one request may hold: what is left for its growing tables beside its full rings."""
        if self.fits(UNBOUNDED, chunks):
            return UNBOUNDED
        return bisect_left(range(UNBOUNDED), True, key=lambda tokens: not self.fits(tokens, chunks)) - 1

    def layout(self, tensor_parallel: int = 1, kv_heads: int | None = None) -> KVLayout:
        """What peers need to know to compute where a token's bytes lie. This is the cache of one of `tensor_parallel`
        ranks; `kv_heads`: of the whole model, to be given where several ranks hold the same head."""
        groups = tuple(GroupLayout(layers=group.layers, window=group.window) for group in self.groups)
        layout = KVLayout(
            groups=groups,
            kv_heads=kv_heads or self.kv_heads * tensor_parallel,
            parts=self.parts,
            page_size=self.page_size,
            head_dim=self.head_dim,
            dtype=self.dtype,
            tensor_parallel=tensor_parallel,
        )
        assert layout.rank_heads == self.kv_heads, f"{self.kv_heads} heads on a rank, {layout.rank_heads} by the layout"
        return layout


def full_geometry(layout: KVLayout) -> CacheGeometry:
    """Of one rank of a model whose layers all attend to everything."""
    group = LayerGroup(AttentionType.FULL, tuple(range(layout.layers)))
    return CacheGeometry(layout.page_size, layout.rank_heads, layout.head_dim, layout.dtype, (group,), layout.parts)
