"""The geometry of a KV page pool, cut over ranks: enough to compute where a token's bytes lie, and nothing else.

A rank's pool holds, for each group of layers, blocks `[layers of the group, heads of the rank, parts, page_size,
head_dim]`. A page is the last four axes: one layer's K and V of `page_size` tokens, heads first (HND), so that any
range of heads of a page is one run of bytes.

    4 KV heads over 2 ranks                      2 KV heads over 4 ranks: 2 replica sets
    rank 0: heads 0 1    rank 1: heads 2 3       set 0: rank 0 head 0, rank 2 head 1    set 1: rank 1 head 0, rank 3 ...
"""

from typing import Annotated, Literal

import msgspec

from protocol.context import NO_CONTEXT, ContextLayout

Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
LayerIndex = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
MAX_GROUPS = 8
MAX_RANKS = 64

DType = Literal["float32", "bfloat16", "float16"]
ITEM_SIZES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class GroupLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Layers that share a block table: their indices in the model, ascending. `window`: tokens that each of them keeps,
    position p in slot p mod window; None where all are kept."""

    layers: Annotated[tuple[LayerIndex, ...], msgspec.Meta(min_length=1, max_length=4096)]
    window: Positive | None = None

    def slots(self, tokens: int) -> int:
        """Slots in use once `tokens` tokens are there."""
        return tokens if self.window is None else min(tokens, self.window)


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one engine's pools look like. `kv_heads`: of the whole model. `parts`: 2 (K and V), or 1 where a layer keeps
    one latent vector for all heads (MLA; then `kv_heads` is 1). `page_size` is in tokens. `tensor_parallel`: ranks.
    `context`: of the slots beside the pools, which the main rank alone has.

    Sizes are in bytes, and of one rank. `group` is an index into `groups`.
    """

    groups: Annotated[tuple[GroupLayout, ...], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
    kv_heads: Positive
    parts: Literal[1, 2] = 2
    page_size: Positive
    head_dim: Positive
    dtype: DType
    tensor_parallel: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    context: ContextLayout = NO_CONTEXT

    def problem(self) -> str | None:
        """Why there can be no such pools, or None."""
        heads, ranks = self.kv_heads, self.tensor_parallel
        if heads % ranks and ranks % heads:
            return f"{heads} KV heads cannot be spread over {ranks} ranks evenly"
        if self.parts == 1 and heads != 1:
            return f"a latent vector is one for all heads, not for each of {heads}"
        layers = [layer for group in self.groups for layer in group.layers]
        if sorted(layers) != list(range(len(layers))) or any(sorted(g.layers) != list(g.layers) for g in self.groups):
            return "its groups do not share the model's layers out among themselves"
        return self.context.problem()

    @property
    def layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def is_full(self) -> bool:
        """Every layer keeps all tokens: only then may a prefix be there already."""
        return all(group.window is None for group in self.groups)

    @property
    def rank_heads(self) -> int:
        return max(1, self.kv_heads // self.tensor_parallel)

    @property
    def replica_sets(self) -> int:
        """Sets of ranks that hold all heads between them."""
        return max(1, self.tensor_parallel // self.kv_heads)

    def replica_set(self, index: int) -> range:
        """The ranks of a set, by the heads they hold."""
        return range(index, self.tensor_parallel, self.replica_sets)

    def heads_of(self, rank: int) -> range:
        """Of the model's heads, those that this rank holds."""
        first = rank // self.replica_sets * self.rank_heads
        return range(first, first + self.rank_heads)

    @property
    def token_bytes(self) -> int:
        """One part of one head of one token."""
        return self.head_dim * ITEM_SIZES[self.dtype]

    @property
    def head_bytes(self) -> int:
        """All parts of one head of a page."""
        return self.parts * self.page_size * self.token_bytes

    @property
    def page_bytes(self) -> int:
        return self.rank_heads * self.head_bytes

    def block_bytes(self, group: int) -> int:
        return len(self.groups[group].layers) * self.page_bytes

    def pages_for(self, group: int, tokens: int) -> int:
        """Pages, in each layer of the group, that hold what is kept of `tokens` tokens."""
        return -(-self.groups[group].slots(tokens) // self.page_size)


def full_layout(*, layers: int, kv_heads: int, page_size: int, head_dim: int, dtype: DType) -> KVLayout:
    """On one rank, of a model whose layers all attend to everything."""
    group = GroupLayout(layers=tuple(range(layers)))
    return KVLayout(groups=(group,), kv_heads=kv_heads, page_size=page_size, head_dim=head_dim, dtype=dtype)
