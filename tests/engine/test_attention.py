"""Paged attention in torch against the definition, in float64, row by row and head by head."""

import math
from collections.abc import Sequence

import pytest
import torch

from engine.attention.base import AttentionScores
from engine.attention.torch_paged import TorchPagedAttention
from engine.cache_pool import CachePool
from engine.forward_batch import BatchRow, ForwardBatch
from engine.geometry import full_geometry
from engine.kv_cache import PagedKVCache
from protocol.layout import KVLayout

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 6, 3, 8, 2
SCALING = 1 / math.sqrt(HEAD_DIM)


class Sequences:
    """K and V of whole sequences, and the plain formula over them."""

    def __init__(self, lengths: Sequence[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int, length: int) -> torch.Tensor:
            return torch.randn(heads, length, HEAD_DIM, generator=generator)

        self.queries = [draw(HEADS, n) for n in lengths]
        self.keys = [draw(KV_HEADS, n) for n in lengths]
        self.values = [draw(KV_HEADS, n) for n in lengths]

    def expected(self, index: int, start: int, end: int) -> torch.Tensor:
        """`[end - start, heads, head_dim]`."""
        q, k, v = (t[index].double() for t in (self.queries, self.keys, self.values))
        rows = []
        for position in range(start, end):
            heads = []
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                scores = (k[group, : position + 1] @ q[head, position]) * SCALING
                heads.append(torch.softmax(scores, dim=0) @ v[group, : position + 1])
            rows.append(torch.stack(heads))
        return torch.stack(rows)


def run_batch(
    backend: TorchPagedAttention, sequences: Sequences, layer: int, cuts: Sequence[tuple[int, int, list[int]]]
) -> torch.Tensor:
    rows = [BatchRow(str(i), start, range(start, end), [table], None) for i, (start, end, table) in enumerate(cuts)]
    query, keys, values = (
        torch.cat([tensors[i][:, start:end] for i, (start, end, _) in enumerate(cuts)], dim=1)
        for tensors in (sequences.queries, sequences.keys, sequences.values)
    )
    return backend.attend(layer, query, keys, values, backend.plan(ForwardBatch(rows)), AttentionScores(SCALING))


@pytest.mark.parametrize("page_size", [4, 16])
def test_chunks_and_decodes_in_one_batch_match_the_definition(page_size: int) -> None:
    """Free pages are NaN, so that reading one slot too many shows."""
    layout = KVLayout(layers=LAYERS, kv_heads=KV_HEADS, page_size=page_size, head_dim=HEAD_DIM, dtype="float32")
    pool = CachePool(full_geometry(layout), 32, debug_pages=True)
    backend = TorchPagedAttention(PagedKVCache(pool), torch.float32)
    order = [7, 3, 21, 14, 2, 30, 11, 5, 19, 0, 27, 9, 1, 16, 25]
    tables = [order[:6], order[6:12], order[12:]]
    sequences = Sequences([21, 18, 9], seed=page_size)
    forwards = [[(0, 1), (0, 10), (0, 8)], [(1, 12), (10, 17), (8, 9)], [(12, 21), (17, 18)]]
    for layer in range(LAYERS):
        for cuts in forwards:
            rows = [(start, end, tables[i]) for i, (start, end) in enumerate(cuts)]
            output = run_batch(backend, sequences, layer, rows)
            expected = torch.cat([sequences.expected(i, start, end) for i, (start, end) in enumerate(cuts)])
            torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)


def test_kv_lands_heads_first_in_the_page_of_its_token() -> None:
    layout = KVLayout(layers=LAYERS, kv_heads=KV_HEADS, page_size=4, head_dim=HEAD_DIM, dtype="float32")
    pool = CachePool(full_geometry(layout), 8)
    cache = PagedKVCache(pool)
    sequences = Sequences([7], seed=1)
    run_batch(TorchPagedAttention(cache, torch.float32), sequences, 1, [(0, 7, [5, 2])])
    for position in range(7):
        block, slot = [5, 2][position // 4], position % 4
        assert torch.equal(pool.pages(0)[block, 1, :, 0, slot], sequences.keys[0][:, position])
        assert torch.equal(pool.pages(0)[block, 1, :, 1, slot], sequences.values[0][:, position])
    assert not pool.pages(0)[:, 0].any(), "the other layer is untouched"
    keys, values = cache.read(1, torch.tensor([5, 2]), 6)
    assert torch.equal(keys, sequences.keys[0][:, :6])
    assert torch.equal(values, sequences.values[0][:, :6])
