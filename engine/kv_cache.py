"""Reading and writing KV in the pool's pages, one layer at a time."""

import torch

from engine.cache_pool import CachePool


class PagedKVCache:
    """Views of a pool, per layer: K and V are each `[blocks, kv_heads, page_size, head_dim]`, heads before tokens."""

    def __init__(self, pool: CachePool) -> None:
        layout = pool.layout
        self.page_size = layout.page_size
        self._kv_heads, self._head_dim = layout.kv_heads, layout.head_dim
        self._keys = [pool.pages[:, layer, :, 0] for layer in range(layout.layers)]
        self._values = [pool.pages[:, layer, :, 1] for layer in range(layout.layers)]
        # [2, kv_heads, blocks, page_size, head_dim]: one gather then yields K and V in token order, in one copy.
        self._by_head = [pool.pages[:, layer].permute(2, 1, 0, 3, 4) for layer in range(layout.layers)]

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Token t of `keys` and `values` `[kv_heads, T, head_dim]` goes to slot `slots[t]` of block `blocks[t]`."""
        self._keys[layer][blocks, :, slots] = keys.transpose(0, 1)
        self._values[layer][blocks, :, slots] = values.transpose(0, 1)

    def read(self, layer: int, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[kv_heads, length, head_dim]` of the first `length` tokens of a block table: never a token more,
        for what lies behind them is stale."""
        pages = self._by_head[layer].index_select(2, table)
        tokens = pages.view(2, self._kv_heads, len(table) * self.page_size, self._head_dim)
        return tokens[0, :, :length], tokens[1, :, :length]
