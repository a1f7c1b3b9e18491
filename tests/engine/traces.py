"""A harness without a model: geometry T0 of the cases (page of 4 tokens, 2 layers, a block is 512 bytes), and traces.

A trace is one string per case: steps separated by ` / `, requests by spaces, `A4@8` for 4 tokens of A from 8 on.
"""

from collections.abc import Callable, Iterable
from typing import Any

from engine.cache_pool import CachePool
from engine.config import ContinuousBatchingConfig
from engine.engine import Engine
from engine.forward_batch import ForwardBatch
from engine.geometry import full_geometry
from engine.limits import Limits
from engine.progress import ProgressWord
from engine.request import Request
from protocol.layout import KVLayout
from protocol.sampling import SamplingParams
from tests.engine.driving import MAX_STEPS, Gathered, assert_at_rest, prefill_request

T0 = KVLayout(layers=2, kv_heads=1, page_size=4, head_dim=8, dtype="float32")
VOCAB = 1000
TOKEN = 1

Emit = Callable[[str, int], int]
"""request id, position of the new token -> the token"""


class FakeRunner:
    """Gives tokens without computing anything, and keeps every batch. `on_run` may look around, or raise."""

    def __init__(self, progress: ProgressWord, emit: Emit) -> None:
        self.batches: list[ForwardBatch] = []
        self.on_run: Callable[[ForwardBatch], None] = lambda _: None
        self._progress = progress
        self._emit = emit

    def run(self, batch: ForwardBatch) -> list[int | None]:
        self.batches.append(batch)
        self.on_run(batch)
        for _ in range(T0.layers):
            self._progress.advance()
        return [self._emit(row.request_id, row.end) for row in batch.rows if row.sample]


class Harness:
    """An engine on T0, stepped by hand."""

    def __init__(
        self,
        num_blocks: int = 64,
        tokens: int = 64,
        margin: float = 0.0,
        emit: Emit = lambda _id, _position: TOKEN,
        eos: Iterable[int] = (),
        max_positions: int = 1 << 20,
        **config: Any,
    ) -> None:
        config = {"max_requests_per_batch": 64, "debug_pages": True, **config}
        self.config = ContinuousBatchingConfig(
            page_size=4, num_blocks=num_blocks, max_batch_tokens=tokens, safety_margin=margin, **config
        )
        progress = ProgressWord()
        self.runner = FakeRunner(progress, emit)
        limits = Limits(VOCAB, max_positions, self.config.cache_tokens, frozenset(eos))
        pool = CachePool(full_geometry(T0), num_blocks, self.config.debug_pages)
        self.engine = Engine(self.config, pool, self.runner, progress, limits)
        self.gathered = Gathered()
        self.requests: dict[str, Request] = {}

    def add(self, request_id: str, prompt: int, new: int, **sampling: Any) -> Request:
        """A prompt of `prompt` distinct tokens, `new` to generate."""
        request = self.make(request_id, prompt, new, **sampling)
        self.engine.add(request)
        return request

    def make(self, request_id: str, prompt: int, new: int, attempt: int = 1, **sampling: Any) -> Request:
        params = SamplingParams(max_new_tokens=new, **sampling)
        request = Request(request_id, list(range(2, 2 + prompt)), params, attempt=attempt)
        self.requests[request_id] = request
        return request

    def add_prefill(self, request_id: str, prompt: int) -> None:
        self.engine.add(prefill_request(request_id, list(range(2, 2 + prompt))))

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
