"""What the main process and a worker tell each other: records on one socketpair, each way in order."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from engine.forward_batch import BatchRow, ForwardBatch, SampleStream
from engine.runner import ForwardResult, SampledToken
from protocol.context import ContextName
from protocol.layout import MAX_RANKS, DType, Positive
from protocol.sampling import SamplingParams

_Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first word to a worker. `port`: where ranks meet, on loopback, if there are several. `head`: of the whole
    engine. `silence_s`: how long a rank waits for the others in a forward. `context`: what the main rank keeps of rows
    that want one."""

    model: str
    dtype: DType
    head: bool
    rank: _Rank
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)] | None
    threads: Positive
    silence_s: float
    context: list[ContextName] = []


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The answer to Load."""


class Serve(msgspec.Struct, frozen=True, tag=True):
    """The cache's size; the file descriptor of the shared memory comes with it."""

    page_size: Positive
    num_chunks: Positive


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The answer to Serve: all ranks have found each other."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """See BatchRow. `wanted`: a token is wanted; the streams say to those who choose it how."""

    start: int
    tokens: Sequence[int]
    tables: Sequence[Sequence[int]]
    wanted: bool
    carry: int
    context: int = -1


class Forward(msgspec.Struct, frozen=True, tag=True):
    """`streams`: of the wanted tokens, in order, without the history where no token depends on it; none for ranks that
    choose none."""

    rows: list[Row]
    streams: list[SampleStream]


class Done(msgspec.Struct, frozen=True, tag=True):
    """From a main rank, the answer to Forward. See ForwardResult. `contexts`: the bytes of each."""

    tokens: list[SampledToken | str]
    started_ns: int
    ended_ns: int
    contexts: list[bytes] = []


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A worker's last word: it cannot go on, in whatever it was doing."""

    reason: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """A worker ends, well."""


Order = Load | Serve | Forward | Stop
Answer = Loaded | Ready | Done | Failed

WELL, FAILED, OTHERS_GONE = 0, 1, 75
"""Exit statuses of a worker. OTHERS_GONE: it ended because another rank did."""

_UNCHOSEN = SampleStream(SamplingParams(max_new_tokens=0), 0)
"""Marks a row whose token another rank chooses."""


def as_forward(batch: ForwardBatch, chosen: bool) -> Forward:
    """`chosen`: the receiver, or one of several, chooses the tokens."""
    rows = [Row(r.start, r.tokens, r.tables, r.sample is not None, r.carry, r.context) for r in batch.rows]
    return Forward(rows, [_as_sent(row.sample) for row in batch.rows if row.sample] if chosen else [])


def as_batch(forward: Forward) -> ForwardBatch:
    """Where no streams came along, rows say no more than that a token is wanted. Raises StopIteration if some are
    missing."""
    streams = iter(forward.streams)
    rows = []
    for number, row in enumerate(forward.rows):
        chosen = (next(streams) if forward.streams else _UNCHOSEN) if row.wanted else None
        rows.append(BatchRow(str(number), row.start, row.tokens, row.tables, chosen, row.carry, row.context))
    return ForwardBatch(rows)


def as_done(result: ForwardResult) -> Done:
    contexts = [values.numpy().tobytes() for values in result.contexts]
    return Done(result.tokens, result.started_ns, result.ended_ns, contexts)


def _as_sent(stream: SampleStream) -> SampleStream:
    return stream if stream.params.needs_history else stream._replace(history=())
