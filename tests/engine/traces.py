"""A harness without a model: geometry T0 of the cases (page of 4 tokens, 2 layers, a block is 512 bytes), and traces.

A trace is one string per case: steps separated by ` / `, requests by spaces, `A4@8` for 4 tokens of A from 8 on.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from engine.cache_pool import CachePool
from engine.config import ContinuousBatchingConfig
from engine.contexts import ContextSlots
from engine.engine import Engine, EngineParts
from engine.errors import DeviceLost
from engine.forward_batch import ForwardBatch
from engine.geometry import AttentionType, CacheGeometry, LayerGroup, full_geometry
from engine.limits import Limits
from engine.progress import ProgressWord
from engine.request import Request
from engine.runner import ForwardResult, Runner, SampledToken
from protocol.context import ContextLayout, ContextPart
from protocol.layout import full_layout
from protocol.sampling import SamplingParams
from tests.engine.driving import MAX_STEPS, Gathered, assert_at_rest, prefill_request

T0 = full_layout(layers=2, kv_heads=1, page_size=4, head_dim=8, dtype="float32")
T1 = CacheGeometry(
    page_size=4,
    kv_heads=1,
    head_dim=8,
    dtype="float32",
    groups=(LayerGroup(AttentionType.FULL, (3,)), LayerGroup(AttentionType.SLIDING, (0, 1, 2), window=8)),
)
"""1 full and 3 sliding layers: a chunk of 768 bytes is 3 full blocks or 1 sliding one."""
VOCAB = 1000
TOKEN = 1

Emit = Callable[[str, int], int]
"""request id, position of the new token -> the token"""


FAKE_CONTEXT = ContextLayout((ContextPart("hidden", 8),))


def context_at(position: int, tokens: Sequence[int]) -> torch.Tensor:
    """Says which position it is of, and how many tokens the row had that it comes from."""
    return torch.tensor([float(position), float(len(tokens))])


class FakeForward:
    def __init__(self, outcome: ForwardResult | Exception) -> None:
        self._outcome = outcome

    def result(self) -> ForwardResult:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class FakeRunner(Runner):
    """Gives tokens without computing anything, and keeps every batch. `on_run` may look around, or raise. A
    forward has run when `launch` returns; asynchronously, the engine learns of it a step later. `lose`: what is to be
    called if a process is lost."""

    def __init__(self, progress: ProgressWord, layers: int, emit: Emit) -> None:
        self.batches: list[ForwardBatch] = []
        self.on_run: Callable[[ForwardBatch], None] = lambda _: None
        self.lose: Callable[[DeviceLost], None] = lambda _: None
        self._progress = progress
        self._layers = layers
        self._emit = emit

    def launch(self, batch: ForwardBatch) -> FakeForward:
        self.batches.append(batch)
        started = time.monotonic_ns()
        try:
            self.on_run(batch)
        except RuntimeError as error:
            return FakeForward(error)
        for _ in range(self._layers):
            self._progress.advance()
        tokens: list[SampledToken | str] = [
            SampledToken(self._emit(row.request_id, row.end)) for row in batch.rows if row.sample
        ]
        contexts = [context_at(row.start + row.context, row.tokens) for row in batch.rows if row.context >= 0]
        return FakeForward(ForwardResult(tokens, started, time.monotonic_ns(), contexts))

    def close(self) -> None: ...

    def when_lost(self, call: Callable[[DeviceLost], None]) -> None:
        self.lose = call


class Harness:
    """An engine on T0 (or another geometry), stepped by hand."""

    def __init__(
        self,
        num_blocks: int = 64,
        tokens: int = 64,
        margin: float = 0.0,
        emit: Emit = lambda _id, _position: TOKEN,
        eos: Iterable[int] = (),
        max_positions: int = 1 << 20,
        geometry: CacheGeometry | None = None,
        sharing: bool = False,
        host_blocks: int = 0,
        asynchronous: bool = False,
        context_slots: int = 0,
        **config: Any,
    ) -> None:
        config = {"max_requests_per_batch": min(64, tokens), "debug_pages": True, **config}
        geometry = geometry or full_geometry(T0)
        self.config = ContinuousBatchingConfig(
            page_size=geometry.page_size,
            num_blocks=num_blocks,
            max_batch_tokens=tokens,
            safety_margin=margin,
            allow_block_sharing=sharing,
            **config,
        )
        progress = ProgressWord()
        self.runner = FakeRunner(progress, geometry.layers, emit)
        pool = CachePool(geometry, geometry.chunks_for(num_blocks), self.config.debug_pages)
        host = CachePool(geometry, geometry.chunks_for(host_blocks), reserved=0) if host_blocks else None
        limits = Limits(VOCAB, max_positions, pool.geometry.max_tokens(pool.num_chunks), frozenset(eos))
        slots = ContextSlots(FAKE_CONTEXT, context_slots, debug=True) if context_slots else None
        parts = EngineParts(pool, self.runner, progress, limits, host, asynchronous, contexts=slots)
        self.engine = Engine(self.config, parts)
        self.gathered = Gathered()
        self.requests: dict[str, Request] = {}

    def add(self, request_id: str, prompt: "int | list[int]", new: int, **sampling: Any) -> Request:
        """A prompt of `prompt` distinct tokens, or this one; `new` to generate."""
        request = self.make(request_id, prompt, new, **sampling)
        self.engine.add(request)
        return request

    def make(
        self, request_id: str, prompt: "int | list[int]", new: int, attempt: int = 1, n: int = 1, **sampling: Any
    ) -> Request:
        params = SamplingParams(max_new_tokens=new, **sampling)
        tokens = list(range(2, 2 + prompt)) if isinstance(prompt, int) else prompt
        request = Request(request_id, tokens, params, attempt=attempt, n=n)
        self.requests[request_id] = request
        return request

    def reserve(self, request_id: str, prompt: int, new: int, attempt: int = 1, n: int = 1) -> list[int]:
        """Its blocks."""
        return self.engine.reserve(self.make(request_id, prompt, new, attempt, n)).tables[0]

    def can_reserve(self, prompt: int) -> bool:
        return self.engine.can_reserve(Request("?", list(range(prompt)), SamplingParams(max_new_tokens=1)))

    def add_prefill(self, request_id: str, prompt: "int | list[int]") -> None:
        tokens = list(range(2, 2 + prompt)) if isinstance(prompt, int) else prompt
        self.engine.add(prefill_request(request_id, tokens))

    def step(self) -> str:
        """One step; what ran in it, in the trace's words ("" for nothing)."""
        before = len(self.runner.batches)
        self.gathered.take(self.engine.step())
        self.gathered.steps += 1
        self.engine.check()
        return " ".join(self.words(batch) for batch in self.runner.batches[before:])

    def steps(self, count: int) -> str:
        return " / ".join(self.step() for _ in range(count))

    def run(self) -> str:
        """Step until nothing would happen; the trace of the steps in which something ran."""
        trace: list[str] = []
        while self.engine.has_work:
            assert len(trace) < MAX_STEPS
            trace.append(self.step())
        return " / ".join(step for step in trace if step)

    def blocks(self, request_id: str) -> int:
        return sum(entry["owner"] == request_id for entry in self.engine.ledger())

    def generated(self, request_id: str) -> int:
        return len(self.gathered.tokens[request_id])

    def assert_at_rest(self) -> None:
        assert_at_rest(self.engine)

    @staticmethod
    def words(batch: ForwardBatch) -> str:
        return " ".join(f"{row.request_id}{len(row.tokens)}@{row.start}" for row in batch.rows)
