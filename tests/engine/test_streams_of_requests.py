"""Random streams of requests through a whole engine, against an oracle that knows nothing of pages.

Every setting that changes how work is cut up is drawn: scheduler, page and pool sizes, budgets, margin, sharing and
eviction, offloading, synchronous or not, full or hybrid attention. What must not depend on any of it: each request's
tokens, one end for each, a bounded number of overtakes, and an engine at rest afterwards.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.cache_pool import CachePool
from engine.config import ContinuousBatchingConfig
from engine.engine import Engine, EngineParts
from engine.errors import CapacityExceeded
from engine.geometry import AttentionType, CacheGeometry, LayerGroup
from engine.limits import Limits
from engine.progress import ProgressWord
from engine.request import Request
from protocol.messages import FailureCode, FinishReason
from protocol.sampling import SamplingParams
from tests.engine.driving import MAX_STEPS, Gathered
from tests.engine.folding import VOCAB, FoldingRunner, expected, words_of

EXPLORE = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.generate, Phase.shrink),
    print_blob=True,
)
ENDS = frozenset({0, 1, 2, 3})
FULL = (LayerGroup(AttentionType.FULL, (0, 1)),)
HYBRID = (LayerGroup(AttentionType.FULL, (1,)), LayerGroup(AttentionType.SLIDING, (0, 2), window=6))
SCATTERING = (LayerGroup(AttentionType.FULL, (1, 3)), LayerGroup(AttentionType.SLIDING, (0, 2, 4), window=6))
"""Several blocks of either group in a chunk: neither can use what the other leaves free in one."""


@dataclass(frozen=True)
class Shape:
    """One engine's settings. `host`: chunks of host memory."""

    groups: tuple[LayerGroup, ...]
    page_size: int
    blocks: int
    host: int
    asynchronous: bool
    config: dict[str, Any]

    def engine(self) -> tuple[Engine, FoldingRunner]:
        geometry = CacheGeometry(self.page_size, 1, 4, "float32", self.groups)
        pool = CachePool(geometry, geometry.chunks_for(self.blocks), debug_pages=True)
        progress = ProgressWord()
        runner = FoldingRunner(pool, progress)
        limits = Limits(VOCAB, 1 << 20, pool.geometry.max_tokens(pool.num_chunks), ENDS)
        host = CachePool(geometry, self.host, reserved=0) if self.host else None
        config = ContinuousBatchingConfig(
            page_size=self.page_size, num_blocks=self.blocks, debug_pages=True, seed=0, **self.config
        )
        return Engine(config, EngineParts(pool, runner, progress, limits, host, self.asynchronous)), runner


@dataclass(frozen=True)
class Arrival:
    """`family`: prompts of one family begin alike. `gap`: steps before it comes. `cancel`: steps after which it is
    cancelled, or not. `remote`: its KV comes from elsewhere, after so many steps."""

    family: int
    length: int
    new: int
    gap: int
    n: int
    cancel: int | None
    remote: int | None

    def prompt(self, index: int) -> list[int]:
        """The common part repeats itself: pages of equal content, behind other prefixes."""
        common = [(self.family * 31 + i % 8) % VOCAB for i in range(self.length * 3 // 4)]
        return common + [(index * 13 + i * 5) % VOCAB for i in range(self.length - len(common))]


shapes = st.builds(
    Shape,
    groups=st.sampled_from([FULL, FULL, HYBRID, SCATTERING]),
    page_size=st.sampled_from([4, 5, 8]),
    blocks=st.integers(4, 24),
    host=st.sampled_from([0, 0, 6, 30]),
    asynchronous=st.booleans(),
    config=st.fixed_dictionaries(
        {
            "max_batch_tokens": st.sampled_from([2, 7, 16, 200]),
            "max_requests_per_batch": st.sampled_from([2, 50]),
            "scheduler_type": st.sampled_from(["fifo", "prefill_first"]),
            "safety_margin": st.sampled_from([0.0, 0.15, 0.5, 1.0]),
            "max_overtakes": st.sampled_from([1, 3, 64]),
            "allow_block_sharing": st.booleans(),
            "eviction_policy": st.sampled_from(["most_recent", "lru", "all"]),
        }
    ),
)
arrivals = st.builds(
    Arrival,
    family=st.integers(0, 2),
    length=st.integers(1, 40),
    new=st.integers(0, 20),
    gap=st.integers(0, 3),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    cancel=st.sampled_from([None, None, None, 0, 1, 4]),
    remote=st.sampled_from([None, None, None, 0, 2]),
)


@dataclass
class Stream:
    """One life of an engine: arrivals come in, are cancelled, or wait for their KV."""

    shape: Shape
    requests: dict[str, Request] = field(default_factory=dict)
    events: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.engine, self.runner = self.shape.engine()
        self.gathered = Gathered()
        self.step_number = 0
        self.quarantined: list[str] = []

    def run(self, arrivals: list[Arrival]) -> None:
        for index, arrival in enumerate(arrivals):
            for _ in range(arrival.gap):
                self.step()
            self.arrive(f"r{index}", arrival, index)
        while self.engine.has_work or self.events or self.quarantined:
            assert self.step_number < MAX_STEPS, "it does not come to rest"
            self.step()
            if not self.engine.has_work and not self.events:
                self.free_quarantined()

    def arrive(self, name: str, arrival: Arrival, index: int) -> None:
        sampling = SamplingParams(max_new_tokens=arrival.new)
        delay = arrival.remote if self.shape.groups is FULL else None
        request = Request(name, arrival.prompt(index), sampling, n=arrival.n, priority=arrival.family % 2)
        try:
            if delay is None:
                self.engine.add(request)
                self.requests[name] = request
            else:
                self.reserve(request, delay)
        except CapacityExceeded:
            assert len(request.prompt) > self.engine.max_context
            return
        if arrival.cancel is not None:
            self.events[self.step_number + arrival.cancel].append(lambda: self.cancel(request))

    def reserve(self, request: Request, delay: int) -> None:
        """Nothing happens to one that finds no room: a node would keep it for later."""
        if not self.engine.can_reserve(request):
            self.engine.validate(request)
            return
        self.requests[request.id] = request
        reservation = self.engine.reserve(request)
        computed = len(request.prompt) - 1

        def arrive() -> None:
            if request.is_terminal:
                return
            words = words_of(request.prompt)
            for position in range(reservation.cached * self.shape.page_size, computed):
                self.runner.write(reservation.tables, position, int(words[position]))
            self.engine.resume(request.id, computed)

        self.events[self.step_number + delay].append(arrive)

    def cancel(self, request: Request) -> None:
        self.engine.abort(request.id)
        if self.engine.pages_quarantined:
            self.quarantined.append(request.id)

    def free_quarantined(self) -> None:
        for name in self.quarantined:
            self.engine.free_quarantined(name, 1)
        self.quarantined.clear()

    def step(self) -> None:
        for event in self.events.pop(self.step_number, []):
            event()
        self.step_number += 1
        self.gathered.take(self.engine.step())
        self.engine.check()
        for request in self.requests.values():
            assert request.overtakes <= self.shape.config["max_overtakes"]


def assert_as_expected(stream: Stream) -> None:
    names = {name: request for request in stream.requests.values() for name in (request.id, *request.child_ids())}
    assert stream.gathered.ended.keys() == names.keys()
    for name, request in names.items():
        ended, tokens = stream.gathered.ended[name], stream.gathered.tokens[name]
        sequence = 0 if name == request.id else int(name.rpartition("#")[2])
        seed = (request.samples.seed + sequence) % (1 << 63)
        whole = expected(request.prompt, request.sampling.max_new_tokens, stream.shape.groups, ENDS, seed)
        if ended.reason is FinishReason.CANCELLED:
            assert tokens == whole[: len(tokens)]
        elif ended.failure is not None:
            assert ended.failure.code is FailureCode.CAPACITY
            assert tokens == whole[: len(tokens)]
            assert len(request.prompt) + len(tokens) > stream.engine.max_context
        else:
            assert tokens == whole


def assert_at_rest(stream: Stream) -> None:
    engine = stream.engine
    engine.check()
    engine.close()
    assert (engine.running, engine.waiting, engine.pages_quarantined) == (0, 0, 0)
    assert engine.pages_free == engine.pages_total
    store = engine.offload
    assert store is None or store.free == store.total


@pytest.mark.timeout(300)
@settings(EXPLORE, max_examples=150)
@given(shape=shapes, stream=st.lists(arrivals, min_size=1, max_size=12))
def test_no_setting_changes_a_token_and_all_comes_to_rest(shape: Shape, stream: list[Arrival]) -> None:
    life = Stream(shape)
    life.run(stream)
    assert_as_expected(life)
    assert_at_rest(life)


def test_the_oracle_notices_one_wrong_word() -> None:
    """The planted corruption: a word of the first page, changed after the prompt ran."""
    shape = Shape(FULL, 4, 24, 0, False, {"max_batch_tokens": 200, "max_overtakes": 64})
    life = Stream(shape)
    life.arrive("r0", Arrival(0, 20, 12, 0, 1, None, None), 0)
    life.step()
    table = life.engine._cache.tables(life.requests["r0"].owner)
    life.runner.write(table, 2, 12345)
    while life.engine.has_work:
        life.step()
    with pytest.raises(AssertionError):
        assert_as_expected(life)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(EXPLORE, max_examples=1500, derandomize=False)
@given(shape=shapes, stream=st.lists(arrivals, min_size=1, max_size=30))
def test_no_setting_changes_a_token_over_many_streams(shape: Shape, stream: list[Arrival]) -> None:
    life = Stream(shape)
    life.run(stream)
    assert_as_expected(life)
    assert_at_rest(life)
