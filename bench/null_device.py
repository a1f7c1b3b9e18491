"""An engine without a model: its device gives tokens at once. What is left is the engine's own work."""

import random
from time import monotonic_ns

from engine.cache_pool import CachePool
from engine.config import ContinuousBatchingConfig, SchedulerType
from engine.engine import Engine, EngineParts
from engine.forward_batch import ForwardBatch
from engine.geometry import full_geometry
from engine.limits import Limits
from engine.progress import ProgressWord
from engine.runner import ForwardResult, Runner, SampledToken
from protocol.layout import full_layout
from protocol.sampling import SamplingParams

VOCAB = 50_000
END, STOP, TOKEN = 0, 1, 2
"""Tokens that would end a request, and the one that the device gives."""
CONTEXT = 512
PAGE_SIZE = 16
HEAD_DIM = 4


class NullForward:
    def __init__(self, result: ForwardResult) -> None:
        self._result = result

    def result(self) -> ForwardResult:
        return self._result


class NullDevice(Runner):
    def launch(self, batch: ForwardBatch) -> NullForward:
        now = monotonic_ns()
        tokens: list[SampledToken | str] = [SampledToken(TOKEN)] * batch.num_samples
        return NullForward(ForwardResult(tokens, now, now))

    def close(self) -> None: ...


def null_engine(
    batch: int, scheduler: SchedulerType, new_tokens: int, page_size: int = PAGE_SIZE, max_batch_tokens: int = 2048
) -> Engine:
    """Room for `batch` requests of CONTEXT and `new_tokens` tokens, with half as much again; all features are on."""
    num_blocks = batch * (CONTEXT + PAGE_SIZE + new_tokens) * 3 // 2 // page_size
    return build_null(
        ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=num_blocks,
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=batch,
            scheduler_type=scheduler,
        ),
        host_blocks=num_blocks // 4,
    )


def build_null(config: ContinuousBatchingConfig, host_blocks: int = 0) -> Engine:
    """Of one layer with one small head, so that the pages of a large cache take little memory."""
    assert config.num_blocks is not None
    layout = full_layout(layers=1, kv_heads=1, page_size=config.page_size, head_dim=HEAD_DIM, dtype="float32")
    geometry = full_geometry(layout)
    pool = CachePool(geometry, geometry.chunks_for(config.num_blocks))
    host = CachePool(geometry, geometry.chunks_for(host_blocks), reserved=0) if host_blocks else None
    limits = Limits(VOCAB, 1 << 30, pool.geometry.max_tokens(pool.num_chunks), frozenset([END]))
    return Engine(config, EngineParts(pool, NullDevice(), ProgressWord(), limits, host))


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(STOP + 1, VOCAB) for _ in range(length)]


def sampling(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=new_tokens, stop_token_ids=(STOP,), temperature=0.8, top_p=0.95, seed=1)
