"""FlashInfer over the pool's shuffled pages against plain torch, in both kinds of group, on the device."""

import inspect
from typing import Any

import pytest
import torch

from engine.attention.base import AttentionScores
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.torch_paged import TorchPagedAttention
from engine.cache_pool import DTYPES
from engine.geometry import LayerGroup
from protocol.layout import DType
from tests.engine import fake_flashinfer
from tests.engine.paged_cases import FULL, HYBRID, Cases, assert_close, geometry

SCORES = AttentionScores(0.125)


def on_cpu(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize("groups", [FULL, HYBRID])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_torch_computes_there_what_it_computes_on_a_cpu(groups: tuple[LayerGroup, ...], dtype: DType) -> None:
    there = Cases(geometry(groups, dtype), heads=6, seed=1, device="cuda")
    here = Cases(geometry(groups, dtype), heads=6, seed=1)
    got = there.outputs(TorchPagedAttention(there.cache(), DTYPES[dtype]), SCORES)
    assert_close(on_cpu(got), here.outputs(TorchPagedAttention(here.cache(), DTYPES[dtype]), SCORES))


@pytest.mark.parametrize("groups", [FULL, HYBRID])
@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (6, 2), (8, 1)])
@pytest.mark.parametrize("scores", [SCORES, AttentionScores(0.2, softcap=3.0)])
def test_flashinfer_computes_what_plain_torch_does(
    flashinfer: Any,
    groups: tuple[LayerGroup, ...],
    page_size: int,
    heads: int,
    kv_heads: int,
    scores: AttentionScores,
) -> None:
    """Pages are NaN until written, and K and V are strided views. One dtype: each costs minutes of compiling."""
    cases = Cases(geometry(groups, "float16", page_size, kv_heads), heads, seed=heads, device="cuda")
    flash = FlashInferAttention(cases.cache(), heads, scores, flashinfer)
    wanted = cases.outputs(TorchPagedAttention(cases.cache(), torch.float16), scores)
    assert_close(on_cpu(cases.outputs(flash, scores)), on_cpu(wanted))


@pytest.mark.parametrize("name", ["BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"])
def test_the_stand_ins_take_what_the_real_wrappers_take(flashinfer: Any, name: str) -> None:
    real, fake = getattr(flashinfer, name), getattr(fake_flashinfer, name)
    for method in ("__init__", "plan", "run", "reset_workspace_buffer"):
        taken = inspect.signature(getattr(real, method)).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
            continue
        assert set(inspect.signature(getattr(fake, method)).parameters) <= set(taken), method
