"""What one forward works on, in plain numbers: no tensors yet."""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.sampling import SamplingParams


@dataclass(frozen=True)
class SampleKey:
    """How the next token of a request is chosen: depends on nothing but the request itself, so neither batching nor a
    restart changes it. `position`: of the new token, in the request's whole sequence."""

    params: SamplingParams
    seed: int
    position: int


@dataclass(frozen=True)
class BatchRow:
    """`tokens` of one request at positions `start`... `blocks`: its block table. `sample` None: no token is wanted."""

    request_id: str
    start: int
    tokens: Sequence[int]
    blocks: Sequence[int]
    sample: SampleKey | None

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
    def samples(self) -> list[SampleKey]:
        return [row.sample for row in self.rows if row.sample]
