"""The geometry of a KV page pool: enough to compute where a page's bytes lie, and nothing else."""

from typing import Annotated, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]

DType = Literal["float32", "bfloat16", "float16"]
ITEM_SIZES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pool is `[blocks, layers, kv_heads, 2, page_size, head_dim]` of `dtype`, contiguous.

    A page is the last four axes: one layer's K and V of `page_size` tokens, heads first (HND). A block is one page
    per layer. `page_size` is in tokens.
    """

    layers: Positive
    kv_heads: Positive
    page_size: Positive
    head_dim: Positive
    dtype: DType

    @property
    def page_bytes(self) -> int:
        return self.kv_heads * 2 * self.page_size * self.head_dim * ITEM_SIZES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page_bytes

    def pages_for(self, tokens: int) -> int:
        """Pages (per layer) that hold `tokens` tokens."""
        return -(-tokens // self.page_size)
