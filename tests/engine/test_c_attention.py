"""The C kernels of attention, each variant that this machine runs, against the formula in float64."""

import dataclasses
import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.attention.c_paged import CPagedAttention
from engine.attention.choice import choose_backend
from engine.attention.torch_paged import TorchPagedAttention
from engine.cache_pool import CachePool
from engine.forward_batch import ForwardBatch
from engine.geometry import CacheGeometry, full_geometry
from engine.kv_cache import PagedKVCache
from engine.native import core, openmp_runtimes
from protocol.layout import DType, full_layout
from tests.engine.attention_oracle import Scene, Stage

SHORT = 48
"""Longer rows go through torch."""
VARIANTS = {"portable": 0, "avx2": 1, "avx512": 2}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> int:
    number = VARIANTS[request.param]
    if not core().lib.kf_runs_variant(number, 16):
        pytest.skip(f"this CPU has no {request.param}")
    return number


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_right(stage: Stage, variant: int) -> None:
    """Outputs, and every byte of the pool."""
    backend = CPagedAttention(stage.cache, variant, SHORT)
    for layer in stage.cache.layers:
        output = stage.run(backend, layer)
        np.testing.assert_allclose(output.double().numpy(), stage.expected(layer), rtol=1e-4, atol=2e-5)
        found = stage.pool.raw_blocks(0).clone()
        stage.expect_written(layer)
        assert torch.equal(found, stage.pool.raw_blocks(0))


ROWS = ((0, 1), (300, 1), (0, 7), (63, 5), (21, 1), (17, 32), (64, 64), (16, 1), (1, 40))


@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("share", [1, 3, 4, 7])
def test_decodes_and_chunks_in_one_batch_match_the_formula(variant: int, page_size: int, share: int) -> None:
    assert_right(Stage(Scene(page_size, 2, share, 16, (None, None), ROWS)), variant)


@pytest.mark.parametrize("window", [1, 3, 5, 16, 21, 33, 100])
@pytest.mark.parametrize("page_size", [4, 16])
def test_sliding_layers_read_their_ring_before_a_chunk_is_written_into_it(
    variant: int, page_size: int, window: int
) -> None:
    assert_right(Stage(Scene(page_size, 1, 3, 16, (window, None, window, window), ROWS)), variant)


def random_scene(seed: int) -> Scene:
    r = random.Random(seed)
    windows = [None, None, r.choice([None, r.randint(1, 150)])]
    r.shuffle(windows)
    counts = [r.choice([1, 1, 1, r.randint(2, SHORT + 8)]) for _ in range(r.randint(1, 5))]
    return Scene(
        page_size=r.choice([4, 16, 64]),
        kv_heads=r.randint(1, 3),
        share=r.choice([1, 2, 3, 4, 5, 8]),
        head_dim=r.choice([8, 16, 24, 64, 80, 128]),
        windows=tuple(windows),
        rows=tuple((r.choice([0, r.randint(1, 40), r.randint(41, 700)]), count) for count in counts),
        softcap=r.choice([None, 2.0, 30.0]),
        sinks=r.random() < 0.4,
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(30))
def test_random_scenes_match_the_formula(seed: int) -> None:
    scene = random_scene(seed)
    for variant in VARIANTS.values():
        if core().lib.kf_runs_variant(variant, scene.head_dim):
            assert_right(Stage(scene), variant)


def test_one_kv_head_may_serve_more_query_heads_than_a_unit_of_work_takes(variant: int) -> None:
    assert_right(Stage(Scene(4, 1, 71, 16, (None, 9), ((33, 1), (5, 6), (0, 2)), sinks=True)), variant)


def test_long_contexts_are_cut_into_pieces_and_joined(variant: int) -> None:
    rows = ((2047, 1), (1100, 3), (256, 1), (255, 1), (1030, 1))
    assert_right(Stage(Scene(16, 1, 2, 16, (None,), rows, softcap=5.0, sinks=True)), variant)


@pytest.mark.parametrize("share", [3, 16])
@pytest.mark.parametrize("windows", [(None,), (70,)])
def test_chunks_of_many_blocks_of_queries_match_the_formula(
    variant: int, share: int, windows: tuple[int | None]
) -> None:
    stage = Stage(Scene(16, 1, share, 16, windows, ((0, 260), (90, 65), (5, 1)), softcap=9.0))
    output = stage.run(CPagedAttention(stage.cache, variant), 0)
    np.testing.assert_allclose(output.double().numpy(), stage.expected(0), rtol=1e-4, atol=2e-5)


def test_long_chunks_between_short_ones_go_through_torch(variant: int) -> None:
    rows = ((5, 1), (40, SHORT + 1), (0, SHORT + 2), (9, 2), (0, SHORT + 1), (7, 1))
    assert_right(Stage(Scene(16, 2, 2, 16, (None, 24), rows, softcap=20.0)), variant)


def test_scores_far_apart_and_very_large_ones_are_exact(variant: int) -> None:
    stage = Stage(Scene(4, 1, 2, 16, (None,), ((90, 2),), seed=5))
    stage.query *= 300
    assert_right(stage, variant)


def test_what_is_not_a_number_stays_with_its_own_row(variant: int) -> None:
    stage = Stage(Scene(4, 1, 2, 16, (None,), ((9, 1), (70, 1))))
    stage.query[:, 0] = np.nan
    output = stage.run(CPagedAttention(stage.cache, variant), 0)
    assert output[0].isnan().all()
    np.testing.assert_allclose(output[1].double().numpy(), stage.expected(0)[1], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("windows", [(None,), (40,)])
def test_a_row_gets_the_same_bits_with_any_neighbours_and_threads(variant: int, windows: tuple[int | None]) -> None:
    scene = Scene(16, 2, 3, 16, windows, ((700, 1), (13, 9), (0, 20), (1025, 1), (64, 30), (31, 270), (290, 1)))
    stage = Stage(scene)
    backend = CPagedAttention(stage.cache, variant)
    torch.set_num_threads(2)
    together = stage.run(backend, 0)
    np.testing.assert_allclose(together.double().numpy(), stage.expected(0), rtol=1e-4, atol=2e-5)
    torch.set_num_threads(1)
    alone, begin = Stage(scene), 0
    for row, (_, count) in zip(alone.batch().rows, scene.rows, strict=True):
        keys, values = (torch.from_numpy(t[:, row.start :]).float() for t in alone.sequences[0][int(row.request_id)])
        query = torch.from_numpy(alone.query[:, begin : begin + count]).float()
        backend = CPagedAttention(alone.cache, variant)
        output = backend.attend(0, query, keys, values, backend.plan(ForwardBatch([row])), alone.scores)
        assert torch.equal(output, together[begin : begin + count])
        begin += count


@pytest.mark.parametrize("seed", range(100, 106))
def test_the_torch_backend_agrees(seed: int) -> None:
    ours, theirs = Stage(random_scene(seed)), Stage(random_scene(seed))
    for layer in ours.cache.layers:
        output = ours.run(CPagedAttention(ours.cache, short=SHORT), layer)
        torch.testing.assert_close(output, theirs.run(TorchPagedAttention(theirs.cache, torch.float32), layer))
    assert torch.equal(ours.pool.raw_blocks(0), theirs.pool.raw_blocks(0))


def geometry(head_dim: int, dtype: DType = "float32") -> CacheGeometry:
    return full_geometry(full_layout(layers=1, kv_heads=1, page_size=4, head_dim=head_dim, dtype=dtype))


def test_the_kernel_is_chosen_where_it_can_serve() -> None:
    backend, why = choose_backend(PagedKVCache(CachePool(geometry(64), 2)), torch.float32)
    assert isinstance(backend, CPagedAttention)
    assert why == f"C kernels, {backend.variant}"


@pytest.mark.parametrize(("head_dim", "dtype"), [(12, torch.float32), (64, torch.bfloat16)])
def test_torch_is_chosen_where_no_kernel_can(head_dim: int, dtype: torch.dtype) -> None:
    name: DType = "bfloat16" if dtype is torch.bfloat16 else "float32"
    backend, why = choose_backend(PagedKVCache(CachePool(geometry(head_dim, name), 2)), dtype)
    assert isinstance(backend, TorchPagedAttention)
    assert f"{name} and heads of {head_dim}" in why


def test_torch_is_chosen_for_latent_vectors() -> None:
    latents = dataclasses.replace(geometry(64), parts=1)
    backend, why = choose_backend(PagedKVCache(CachePool(latents, 2)), torch.float32)
    assert isinstance(backend, TorchPagedAttention)
    assert "MLA" in why


def test_a_head_that_wide_vectors_do_not_divide_gets_narrower_ones() -> None:
    lib = core().lib
    assert lib.kf_best_variant(16) >= lib.kf_best_variant(8) >= lib.kf_best_variant(4) == VARIANTS["portable"]


def test_one_openmp_runtime_is_mapped() -> None:
    core()
    assert len(openmp_runtimes()) == 1


WITHOUT_EXTENSION = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
sys.modules["engine._core"] = None
import torch
from engine.attention.choice import choose_backend
from engine.cache_pool import CachePool
from engine.geometry import full_geometry
from engine.kv_cache import PagedKVCache
from protocol.layout import full_layout
geometry = full_geometry(full_layout(layers=1, kv_heads=1, page_size=4, head_dim=64, dtype="float32"))
print(type(choose_backend(PagedKVCache(CachePool(geometry, 2)), torch.float32).backend).__name__)
"""


def test_without_the_extension_torch_serves_and_the_log_names_the_remedy() -> None:
    asked = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTENSION], capture_output=True, text=True, timeout=100, check=True
    )
    assert asked.stdout.count("TorchPagedAttention\n") == 1
    assert "run `python -m engine._build`" in asked.stdout
