"""Where each layer's K and V lie in a pool."""

from dataclasses import dataclass

import torch

from engine.cache_pool import CachePool
from engine.geometry import LayerGroup


@dataclass(frozen=True)
class Places:
    """Token i lies in slot `slots[i]` of block `blocks[i]`."""

    blocks: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class LayerCache:
    """One layer's view of a pool, heads before tokens. `keys` and `values`: `[blocks, kv_heads, page_size, head_dim]`,
    strided. `group` indexes the geometry's groups (and with them a row's `tables`). Where pages have one part, a latent
    vector, `values` are the `keys`."""

    group: int
    keys: torch.Tensor
    values: torch.Tensor
    both: torch.Tensor
    """`[parts, kv_heads, blocks, page_size, head_dim]`: one gather yields K and V in token order, in one copy."""


class PagedKVCache:
    """Reading and writing KV in the pool's pages, one layer at a time."""

    def __init__(self, pool: CachePool) -> None:
        self.geometry = pool.geometry
        self.page_size = pool.geometry.page_size
        self.layers: dict[int, LayerCache] = {}
        for index, group in enumerate(pool.geometry.groups):
            pages = pool.pages(index)
            for ordinal, layer in enumerate(group.layers):
                both = pages[:, ordinal].permute(2, 1, 0, 3, 4)
                self.layers[layer] = LayerCache(index, pages[:, ordinal, :, 0], pages[:, ordinal, :, -1], both)

    @property
    def device(self) -> torch.device:
        return self.layers[0].keys.device

    def group_of(self, layer: int) -> LayerGroup:
        return self.geometry.groups[self.layers[layer].group]

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Token t of `keys` and `values` `[kv_heads, T, head_dim]` goes to slot `slots[t]` of block `blocks[t]`."""
        self.layers[layer].keys[blocks, :, slots] = keys.transpose(0, 1)
        self.layers[layer].values[blocks, :, slots] = values.transpose(0, 1)

    def read(self, layer: int, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[kv_heads, length, head_dim]` of the first `length` tokens of a block table: never a token more,
        for what lies behind them is stale."""
        pages = self.layers[layer].both.index_select(2, table)
        tokens = pages.view(2, self.geometry.kv_heads, len(table) * self.page_size, self.geometry.head_dim)
        return tokens[0, :, :length], tokens[1, :, :length]

    def gather(self, layer: int, blocks: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[kv_heads, n, head_dim]` of the tokens in slots `slots[i]` of blocks `blocks[i]`, in that order."""
        tokens = self.layers[layer].both[:, :, blocks, slots]
        return tokens[0], tokens[1]
