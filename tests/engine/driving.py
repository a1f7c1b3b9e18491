"""Running engines in tests, one step at a time."""

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.build import assemble
from engine.config import ContinuousBatchingConfig
from engine.engine import Engine
from engine.models.loading import load_model
from engine.outputs import Ended, PrefillChunk, StepOutput
from engine.request import Request
from protocol.context import ContextName
from protocol.sampling import SamplingParams

MAX_STEPS = 2000


def model_engine(
    directory: Path,
    *,
    page_size: int = 16,
    num_blocks: int = 64,
    max_batch_tokens: int = 64,
    safety_margin: float = 0.0,
    head: bool = True,
    sharing: bool = False,
    context: Sequence[ContextName] = (),
    **settings: Any,
) -> Engine:
    """An engine with a real model; free pages are poisoned."""
    config = ContinuousBatchingConfig(
        page_size=page_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=min(16, max_batch_tokens),
        safety_margin=safety_margin,
        allow_block_sharing=sharing,
        debug_pages=True,
        **settings,
    )
    loaded = load_model(directory, head=head)
    return assemble(loaded, config, context=loaded.context(context))


def greedy_request(request_id: str, prompt: list[int], count: int) -> Request:
    return Request(request_id, prompt, SamplingParams(max_new_tokens=count))


def prefill_request(request_id: str, prompt: list[int]) -> Request:
    return Request(request_id, prompt, SamplingParams(max_new_tokens=0), prefill_only=True)


@dataclass
class Gathered:
    """What many steps reported."""

    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[str, Ended] = field(default_factory=dict)
    prefilled: list[str] = field(default_factory=list)
    steps: int = 0

    def take(self, output: StepOutput) -> None:
        for new in output.tokens:
            assert new.index == len(self.tokens[new.request_id]), f"{new} out of order"
            self.tokens[new.request_id].append(new.token)
        for ended in output.ended:
            assert ended.request_id not in self.ended, f"{ended.request_id} ended twice"
            assert ended.generated == len(self.tokens[ended.request_id])
            self.ended[ended.request_id] = ended
        self.prefilled += output.prefilled


def run(engine: Engine, gathered: Gathered | None = None) -> Gathered:
    """Step until a step would do nothing."""
    gathered = gathered or Gathered()
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            return gathered
        gathered.take(engine.step())
        gathered.steps += 1
        engine.check()
    raise AssertionError(f"still at work after {MAX_STEPS} steps")


def assert_at_rest(engine: Engine) -> None:
    """No request in any table, every page free."""
    engine.check()
    assert (engine.running, engine.waiting, engine.pages_quarantined) == (0, 0, 0)
    assert engine.pages_free == engine.pages_total


def copy_pages(source: Engine, blocks: list[int], target: Engine, onto: list[int]) -> None:
    """What the network would do: bytes, through the addresses of both pools."""
    size = source.layout.block_bytes(0)
    for from_block, to_block in zip(blocks, onto, strict=True):
        ctypes.memmove(target.pool.address + to_block * size, source.pool.address + from_block * size, size)


class Tables:
    """A listener that keeps the block table of every announced request, in token order."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[int]] = {}

    def before_forward(self, chunks: Sequence[PrefillChunk]) -> None:
        for chunk in chunks:
            self.blocks[chunk.request_id] = list(chunk.tables[0])

    def forward_ended(self, chunks: Sequence[PrefillChunk], started_ns: int, ended_ns: int) -> None: ...

    def forward_failed(self, chunks: Sequence[PrefillChunk], error: str) -> None: ...


def prefill_here(engine: Engine, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Run prompts without their last tokens, as a prefill node would; their block tables by request id."""
    tables = Tables()
    engine.listener = tables
    for request_id, prompt in prompts.items():
        engine.add(prefill_request(request_id, prompt[:-1]))
    assert sorted(run(engine).prefilled) == sorted(prompts)
    return tables.blocks
