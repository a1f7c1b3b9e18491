"""What one forward works on, in plain numbers: no tensors yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protocol.sampling import SamplingParams

PLACEHOLDER = -1
"""Stands for a token that the forward before this one is still computing."""


class SampleKey(NamedTuple):
    """How one token of a request is chosen: depends on nothing but the request itself, so neither batching nor a
    restart changes it. `position`: of the new token, in the request's whole sequence. `history`: its known tokens, in
    order, prompt first; `prompt_length` of them are the prompt."""

    params: SamplingParams
    seed: int
    position: int
    history: Sequence[int] = ()
    prompt_length: int = 0


class SampleStream(NamedTuple):
    """A request's keys but for the position: the same for all of its tokens. `history` is a live list: copy what must
    outlive the call."""

    params: SamplingParams
    seed: int
    history: Sequence[int] = ()
    prompt_length: int = 0

    def key(self, position: int) -> SampleKey:
        return SampleKey(self.params, self.seed, position, self.history, self.prompt_length)


@dataclass(slots=True)  # not frozen: one is made for every token, and freezing triples its cost
class BatchRow:
    """`tokens` of one request at positions `start`... `tables`: its block table for each group of the cache geometry,
    in the geometry's order; a sliding group's is a ring (position p lives in slot p mod window). `sample`: what the
    token that follows is drawn from; None: none is wanted. `carry`: where the row's one token is a PLACEHOLDER, which
    of the previous forward's samples it is. `context`: the place among `tokens` of the one whose context is wanted; -1:
    none is."""

    request_id: str
    start: int
    tokens: Sequence[int]
    tables: Sequence[Sequence[int]]
    sample: SampleStream | None = None
    carry: int = -1
    context: int = -1

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of all requests, packed one after the other."""

    rows: Sequence[BatchRow]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def num_samples(self) -> int:
        return sum(row.sample is not None for row in self.rows)

    @property
    def has_contexts(self) -> bool:
        return any(row.context >= 0 for row in self.rows)

    @property
    def samples(self) -> list[SampleKey]:
        """Made anew each time."""
        return [row.sample.key(row.end) for row in self.rows if row.sample]
