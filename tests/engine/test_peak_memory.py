"""A cache sized from memory keeps its promise: the process's peak stays within the share that was asked for."""

import multiprocessing
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from engine.attention.torch_paged import TorchPagedAttention
from engine.cache_pool import CachePool
from engine.forward_batch import BatchRow, ForwardBatch
from engine.geometry import RESERVED_CHUNKS
from engine.kv_cache import PagedKVCache
from engine.memory import available_memory
from engine.model_runner import ModelRunner
from engine.models.binding import BoundModel
from engine.models.loading import load_model
from engine.progress import ProgressWord
from engine.sizing import MemoryBudget, ModelSizes, choose_chunks
from tests.engine.tiny_models import prompt_of
from tests.tiny_model import save_weights

BATCH_TOKENS = 1024
BUDGET = 512 << 20
CONTEXT = 1 << 20
LATENT = {
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


class Peak(NamedTuple):
    budget: int
    taken: int


def fill_and_run(directory: Path) -> Peak:
    """In a fresh process: loads, sizes the cache, touches all of it, and runs the largest forwards there can be."""
    torch.set_num_threads(1)
    loaded = load_model(directory)
    geometry = loaded.geometry(16)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = psutil.Process().memory_info().rss
    available = available_memory(torch.device("cpu"))
    budget = MemoryBudget(available, BUDGET / available)
    use = ModelSizes.of(loaded.model.config).on_cpu(geometry, max_requests=64, asynchronous=False)
    pool = CachePool(geometry, choose_chunks(use, budget, BATCH_TOKENS, None), debug_pages=True)
    pool.pages(0)[:] = 0.5
    backend = TorchPagedAttention(PagedKVCache(pool), torch.float32)
    runner = ModelRunner(BoundModel(loaded.model, backend, ProgressWord()), backend)
    blocks = list(range(RESERVED_CHUNKS, RESERVED_CHUNKS + pool.num_chunks))
    end = len(blocks) * geometry.page_size
    for start in (0, end - BATCH_TOKENS):
        runner.launch(ForwardBatch([BatchRow("r", start, prompt_of(BATCH_TOKENS), [blocks])])).result()
    return Peak(budget.bytes, peak_resident() - before)


def peak_resident() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes", "least"),
    [("llama", {"head_dim": 32}, 0.7), ("deepseek_v3", LATENT, 0.55)],
    ids=["kv", "latent"],
)
def test_the_peak_of_a_full_cache_and_the_largest_forward_is_within_five_percent(
    tmp_path: Path, family: str, sizes: dict[str, Any], least: float
) -> None:
    """The formula adds masks in the making and what latent vectors are expanded to, though these never coexist."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "max_position_embeddings": CONTEXT, **sizes}
    directory = save_weights(tmp_path / "model", family, **sizes)
    with multiprocessing.get_context("spawn").Pool(1) as child:
        peak = child.apply(fill_and_run, (directory,))
    assert peak.taken <= 1.05 * peak.budget, peak
    assert peak.taken >= least * peak.budget, f"the cache could have been larger: {peak}"
