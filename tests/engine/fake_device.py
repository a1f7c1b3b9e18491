"""A device of the CPU's own: queues that are never behind, and graphs that keep what was recorded into them.

The fake kernel is as forgetful as a real one: what a forward was captured with is what it replays with. Of a captured
plan only the buffers are new at each replay; how many keys the longest row may have is not.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.attention.base import AttentionScores
from engine.attention.torch_full import FullPlan, FullRow
from engine.attention.torch_paged import TorchPagedAttention
from engine.forward_batch import ForwardBatch
from engine.graph_cache import Replay
from engine.padding import GraphKey


class Now:
    """A point that has been reached."""

    def wait(self) -> None: ...

    def synchronize(self) -> None: ...


class ImmediateStreams:
    """Everything has run when the call returns. Remembers the order of the queues."""

    def __init__(self) -> None:
        self.used: list[str] = []

    def upload(self) -> AbstractContextManager[object]:
        return self._use("upload")

    def compute(self) -> AbstractContextManager[object]:
        return self._use("compute")

    def download(self) -> AbstractContextManager[object]:
        return self._use("download")

    def mark(self) -> Now:
        return Now()

    def _use(self, name: str) -> AbstractContextManager[object]:
        self.used.append(name)
        return nullcontext()


def record(forward: Callable[[], None]) -> Replay:
    """A capture: the call itself is all there is to keep."""
    return forward


@dataclass
class StaticPlan:
    """`longest`: keys that the kernel was captured for; None: it is not captured."""

    current: Any
    longest: int | None


class StaticPlanner:
    """One plan for each key, written anew each time."""

    def __init__(self, backend: TorchPagedAttention) -> None:
        self._backend = backend
        self._plans: dict[GraphKey, StaticPlan] = {}

    def plan(self, batch: ForwardBatch, key: GraphKey | None) -> StaticPlan:
        current = self._backend.plan(batch)
        if key is None:
            return StaticPlan(current, None)
        longest = max((row.end for row in batch.rows), default=1)
        baked = max(1024, 1 << (longest - 1).bit_length())
        plan = self._plans.setdefault(key, StaticPlan(current, None if key.decode else baked))
        plan.current = current
        return plan


class StaticAttention(TorchPagedAttention):
    """Attends by whatever its plan's buffers hold now."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: Any,
        scores: AttentionScores,
    ) -> torch.Tensor:
        current = plan.current if plan.longest is None else tuple(_cut(part, plan.longest) for part in plan.current)
        return super().attend(layer, query, keys, values, current, scores)


def _cut(plan: FullPlan, longest: int) -> FullPlan:
    """Keys beyond those that the kernel knows of are not seen."""
    return replace(plan, rows=[_cut_row(row, longest) for row in plan.rows])


def _cut_row(row: FullRow, longest: int) -> FullRow:
    if row.length <= longest:
        return row
    return replace(row, length=longest, mask=None if row.mask is None else row.mask[:, :longest])
