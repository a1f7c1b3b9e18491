"""Paged attention in torch against the definition, in float64, row by row and head by head."""

import math
from collections.abc import Sequence

import pytest
import torch

from engine.attention.base import AttentionScores
from engine.attention.torch_paged import TorchPagedAttention
from engine.cache_pool import DTYPES, CachePool
from engine.forward_batch import BatchRow, ForwardBatch
from engine.geometry import AttentionType, CacheGeometry, LayerGroup, full_geometry
from engine.kv_cache import PagedKVCache
from protocol.layout import DType, full_layout

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 6, 3, 8, 2
SCALING = 1 / math.sqrt(HEAD_DIM)
SLIDING_LAYER = 0
"""Layer 0 slides in `hybrid`, layer 1 does not."""
SCORES = {
    "plain": AttentionScores(SCALING),
    "other scaling": AttentionScores(0.7),
    "softcap": AttentionScores(SCALING, softcap=0.8),
    "sinks": AttentionScores(SCALING, sinks=torch.linspace(-2, 3, HEADS)),
}
ORDER = [7, 3, 21, 14, 2, 30, 11, 5, 19, 6, 27, 9, 4, 16, 25]
"""Blocks, in no order."""
TABLES = [ORDER[:6], ORDER[6:12], ORDER[12:]]
FORWARDS = [[(0, 1), (0, 10), (0, 8)], [(1, 12), (10, 17), (8, 9)], [(12, 21), (17, 18)], [(21, 22), (18, 19)]]
"""Where the rows of three requests begin and end, forward by forward: fresh ones, chunks and decodes in one batch."""


class Sequences:
    """K and V of whole sequences, and the plain formula over them."""

    def __init__(self, lengths: Sequence[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int, length: int) -> torch.Tensor:
            return torch.randn(heads, length, HEAD_DIM, generator=generator)

        self.queries = [draw(HEADS, n) for n in lengths]
        self.keys = [draw(KV_HEADS, n) for n in lengths]
        self.values = [draw(KV_HEADS, n) for n in lengths]

    def expected(
        self, index: int, start: int, end: int, scores: AttentionScores = SCORES["plain"], window: int | None = None
    ) -> torch.Tensor:
        """`[end - start, heads, head_dim]`."""
        rows = []
        for position in range(start, end):
            seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
            rows.append(torch.stack([self._head(index, head, position, seen, scores) for head in range(HEADS)]))
        return torch.stack(rows)

    def _head(self, index: int, head: int, position: int, seen: slice, scores: AttentionScores) -> torch.Tensor:
        q, k, v = (t[index].double() for t in (self.queries, self.keys, self.values))
        group = head // (HEADS // KV_HEADS)
        weights = (k[group, seen] @ q[head, position]) * scores.scaling
        if scores.softcap:
            weights = scores.softcap * torch.tanh(weights / scores.softcap)
        total = weights.exp().sum()
        if scores.sinks is not None:
            total = total + scores.sinks[head].double().exp()
        return (weights.exp() / total) @ v[group, seen]


def full(page_size: int, dtype: DType = "float32") -> CacheGeometry:
    layout = full_layout(layers=LAYERS, kv_heads=KV_HEADS, page_size=page_size, head_dim=HEAD_DIM, dtype=dtype)
    return full_geometry(layout)


def hybrid(page_size: int, window: int) -> CacheGeometry:
    sliding = LayerGroup(AttentionType.SLIDING, (SLIDING_LAYER,), window)
    return CacheGeometry(page_size, KV_HEADS, HEAD_DIM, "float32", (LayerGroup(AttentionType.FULL, (1,)), sliding))


def run_batch(
    backend: TorchPagedAttention,
    sequences: Sequences,
    layer: int,
    cuts: Sequence[tuple[int, int, Sequence[list[int]]]],
    scores: AttentionScores = SCORES["plain"],
) -> torch.Tensor:
    """`cuts`: start, end and tables of each sequence's row."""
    rows = [BatchRow(str(i), start, range(start, end), tables) for i, (start, end, tables) in enumerate(cuts)]
    query, keys, values = (
        torch.cat([tensors[i][:, start:end] for i, (start, end, _) in enumerate(cuts)], dim=1)
        for tensors in (sequences.queries, sequences.keys, sequences.values)
    )
    return backend.attend(layer, query, keys, values, backend.plan(ForwardBatch(rows)), scores)


def assert_matches(
    geometry: CacheGeometry, tables: Sequence[Sequence[list[int]]], layer: int, scores: AttentionScores
) -> None:
    """All of FORWARDS, in a pool whose unwritten slots are NaN, so that reading one too many shows."""
    cache = PagedKVCache(CachePool(geometry, 32, debug_pages=True))
    backend = TorchPagedAttention(cache, torch.float32)
    sequences = Sequences([22, 19, 9], seed=geometry.page_size)
    window = cache.group_of(layer).window
    for forward in FORWARDS:
        cuts = [(start, end, tables[i]) for i, (start, end) in enumerate(forward)]
        output = run_batch(backend, sequences, layer, cuts, scores)
        expected = [sequences.expected(i, start, end, scores, window) for i, (start, end) in enumerate(forward)]
        torch.testing.assert_close(output.double(), torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
def test_chunks_and_decodes_in_one_batch_match_the_definition(
    page_size: int, layer: int, scores: AttentionScores
) -> None:
    assert_matches(full(page_size), [[table] for table in TABLES], layer, scores)


@pytest.mark.parametrize(("page_size", "window"), [(4, 8), (4, 4), (16, 32), (4, 6), (8, 3), (4, 1), (4, 19)])
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
def test_in_a_sliding_layer_too(page_size: int, window: int, scores: AttentionScores) -> None:
    pages = -(-window // page_size)
    rings = [ORDER[pages * i : pages * (i + 1)] for i in range(3)]
    tables = [[full_table, ring] for full_table, ring in zip(TABLES, rings, strict=True)]
    assert_matches(hybrid(page_size, window), tables, SLIDING_LAYER, scores)


def test_beside_sliding_layers_full_ones_keep_everything() -> None:
    assert_matches(hybrid(4, 6), [[table, [2, 3]] for table in TABLES], 1, SCORES["plain"])


def test_kv_lands_heads_first_in_the_page_of_its_token() -> None:
    pool = CachePool(full(4), 8)
    cache = PagedKVCache(pool)
    sequences = Sequences([7], seed=1)
    run_batch(TorchPagedAttention(cache, torch.float32), sequences, 1, [(0, 7, [[5, 2]])])
    for position in range(7):
        block, slot = [5, 2][position // 4], position % 4
        assert torch.equal(pool.pages(0)[block, 1, :, 0, slot], sequences.keys[0][:, position])
        assert torch.equal(pool.pages(0)[block, 1, :, 1, slot], sequences.values[0][:, position])
    assert not pool.pages(0)[:, 0].any(), "the other layer is untouched"
    keys, values = cache.read(1, torch.tensor([5, 2]), 6)
    assert torch.equal(keys, sequences.keys[0][:, :6])
    assert torch.equal(values, sequences.values[0][:, :6])


def test_a_ring_keeps_the_last_tokens_where_their_positions_say() -> None:
    pool = CachePool(hybrid(4, 6), 8)
    sequences = Sequences([10], seed=2)
    backend = TorchPagedAttention(PagedKVCache(pool), torch.float32)
    run_batch(backend, sequences, SLIDING_LAYER, [(0, 10, [[3, 4, 6], [5, 2]])])
    slots = pool.pages(1)[[5, 2], 0, :, 0].transpose(0, 1).flatten(1, 2)
    for position in range(4, 10):
        assert torch.equal(slots[:, position % 6], sequences.keys[0][:, position])
    assert not slots[:, 6:].any(), "the window ends within the page"
    pool.pages(1)[[5, 2]] = 0
    assert not pool.pages(1).any(), "what nobody will see is written nowhere"


def test_a_sinks_weight_is_taken_from_the_values() -> None:
    """A sink that outweighs every key leaves nothing."""
    cache = PagedKVCache(CachePool(full(4), 8))
    scores = AttentionScores(SCALING, sinks=torch.full((HEADS,), 100.0))
    output = run_batch(TorchPagedAttention(cache, torch.float32), Sequences([5], seed=3), 0, [(0, 5, [[2, 3]])], scores)
    assert output.abs().max() < 1e-20


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
def test_half_precision_goes_in_and_out(name: DType, scores: AttentionScores) -> None:
    dtype = DTYPES[name]
    backend = TorchPagedAttention(PagedKVCache(CachePool(full(4, name), 8, debug_pages=True)), dtype)
    sequences = Sequences([7], seed=4)
    query, keys, values = (t[0].to(dtype) for t in (sequences.queries, sequences.keys, sequences.values))
    for start, end in [(0, 4), (4, 6), (6, 7)]:
        new = slice(start, end)
        plan = backend.plan(ForwardBatch([BatchRow("R", start, range(start, end), [[5, 2]])]))
        output = backend.attend(1, query[:, new], keys[:, new], values[:, new], plan, scores)
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), sequences.expected(0, start, end, scores), rtol=0.1, atol=0.05)
