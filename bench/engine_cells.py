"""What `python -m bench engine` measures: cells, and the tokens in them. Everything follows from a seed."""

import random
from dataclasses import dataclass
from enum import StrEnum

from bench.peers.lines import Arrival, Prompt

TOKENS = range(100, 49_000)
"""Ids that prompts are drawn from: ordinary tokens of SmolLM2's vocabulary."""
MARGIN = 64
"""Tokens of room that a request has beyond its context: what the decode cells generate."""

LARGEST_PAGE = 256
"""Tokens in a page of the engine with the largest ones."""


class Phase(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Cell:
    """decode: `batch` requests that find `context` tokens each in the cache, all of their prompt but its last token;
    prefill: one prompt of `context` tokens; mixed: `batch` requests in all, `context` tokens the longest prompt."""

    phase: Phase
    batch: int
    context: int


@dataclass(frozen=True, slots=True)
class Load:
    """Arrivals are a Poisson process of `rate` requests a second; lengths are uniform between the bounds."""

    rate: float
    requests: int
    prompt: tuple[int, int] = (64, 512)
    new: tuple[int, int] = (16, 48)


@dataclass(frozen=True, slots=True)
class Plan:
    """`seconds`: what one measurement of a decode cell should take."""

    decode: tuple[Cell, ...]
    prefill: tuple[Cell, ...]
    load: Load
    repeats: int
    seconds: float

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Decode first, longest first: what is filled is only ever cut shorter. Then prompts that may displace it."""
        decode = sorted(self.decode, key=lambda cell: (-cell.context, -cell.batch))
        return (*decode, *self.prefill, Cell(Phase.MIXED, self.load.requests, self.load.prompt[1]))

    @property
    def max_requests(self) -> int:
        return max(cell.batch for cell in self.decode)

    @property
    def max_context(self) -> int:
        longest = max(cell.context for cell in (*self.decode, *self.prefill))
        return max(longest, sum((self.load.prompt[1], self.load.new[1]))) + MARGIN

    @property
    def cache_tokens(self) -> int:
        """Room for all that is filled and generated, and for the longest prompt beside it, in whole pages."""
        longest = [length + MARGIN for length in self.fill_lengths()] + [self.max_context]
        return sum(-(-tokens // LARGEST_PAGE) * LARGEST_PAGE for tokens in longest)

    def fill_lengths(self) -> list[int]:
        """Of prompt 0, 1, ...: the longest that a cell asks of it. One more than the context, which then is a whole
        number of pages for every engine: what an engine computes of a filled prompt is its last token."""
        return [max(c.context for c in self.decode if c.batch > index) + 1 for index in range(self.max_requests)]


def _decode(*shapes: tuple[int, int]) -> tuple[Cell, ...]:
    return tuple(Cell(Phase.DECODE, batch, context) for batch, context in shapes)


FULL = Plan(
    decode=_decode((1, 512), (8, 512), (32, 512), (1, 1024), (8, 1024), (32, 1024)),
    prefill=(Cell(Phase.PREFILL, 1, 512), Cell(Phase.PREFILL, 1, 2048)),
    load=Load(rate=1.0, requests=12),
    repeats=3,
    seconds=2.0,
)
QUICK = Plan(
    decode=_decode((1, 512), (8, 512)),
    prefill=(Cell(Phase.PREFILL, 1, 512),),
    load=Load(rate=1.0, requests=8),
    repeats=3,
    seconds=1.5,
)


def prompts(lengths: list[int], seed: int | str, tokens: range = TOKENS) -> list[Prompt]:
    """Prompt i is the same beginning of the same tokens, whatever its length."""
    return [_draw(random.Random(f"{seed}/{index}"), length, tokens) for index, length in enumerate(lengths)]


def arrivals(load: Load, seed: int) -> list[Arrival]:
    rng, at, all_of_them = random.Random(f"arrivals {seed}"), 0.0, []
    for _ in range(load.requests):
        all_of_them.append(Arrival(at, _draw(rng, rng.randint(*load.prompt), TOKENS), rng.randint(*load.new)))
        at += rng.expovariate(load.rate)
    return all_of_them


def _draw(rng: random.Random, count: int, tokens: range) -> Prompt:
    return [rng.choice(tokens) for _ in range(count)]
