"""Requests that crowd an engine: offloads, soft resets, chunks and prefix hits; and the pages of its ranks."""

import ctypes

import torch

from engine.config import ContinuousBatchingConfig
from engine.engine import Engine
from engine.request import Request
from engine.sizing import GIB
from protocol.sampling import SamplingParams
from tests.engine.tiny_models import prompt_of

BLOCK_BYTES = 3 * 4 * 2 * 4 * 8 * 4
"""Layers, heads, K and V, tokens, elements of a head, bytes of one."""
LIVELY = ContinuousBatchingConfig(
    page_size=4,
    num_blocks=32,
    max_batch_tokens=24,
    max_requests_per_batch=8,
    safety_margin=0.0,
    cpu_offload_space=30 * BLOCK_BYTES / GIB,
    debug_pages=True,
)
"""Room for three of the requests below, and in host memory for two: offloads, soft resets, chunks and prefix hits."""


def lively_requests(seed: int = 1) -> list[Request]:
    """Prompts of which some begin alike; some are drawn, some penalised."""
    shared = prompt_of(17, seed)
    requests = []
    for number in range(10):
        prompt = (shared if number % 2 else []) + prompt_of(5 + 2 * number, seed=seed + 1 + number)
        sampling = SamplingParams(
            max_new_tokens=18,
            temperature=0.8 if number % 3 == 1 else 0.0,
            seed=number,
            repetition_penalty=1.3 if number % 4 == 3 else 1.0,
            logprobs=number % 3 == 1,
        )
        requests.append(Request(f"r{number}", prompt, sampling))
    return requests


def rank_pages(engine: Engine, rank: int, table: list[int]) -> torch.Tensor:
    """`[blocks, layers, heads of the rank, 2, page_size, head_dim]`, from the rank's memory."""
    geometry, memory = engine.pool.geometry, engine.pools[rank]
    raw = (ctypes.c_char * memory.bytes).from_address(memory.address)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.float32)
    shape = (-1, geometry.layers, geometry.kv_heads, 2, geometry.page_size, geometry.head_dim)
    return flat.view(shape)[table]
