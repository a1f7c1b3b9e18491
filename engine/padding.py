"""Padded shapes: few of them, so that a forward captured for one batch serves many others. Pure.

A decode batch (one token a row) gets rows until their number is a power of two. Any other gets one more row, until its
query tokens are a multiple of an interval. A padded row is a prompt of its own that starts nowhere: all its blocks are
of the chunk that nobody reads, it sees no KV but its own, and no token is wanted of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.forward_batch import BatchRow, ForwardBatch
from engine.geometry import WRITE_PADDING_CHUNK, CacheGeometry, LayerGroup

MIN_LONGEST_KEY = 1024


class GraphKey(NamedTuple):
    """What kernels bake in when a forward is captured; equal keys may share a graph. A decode batch is told by
    `query_tokens`, and by whether there are `samples`, rows of logits. `rows`: the kernels' requests, some of them
    possibly empty. `longest_keys`: of each group, the keys of its longest row, rounded up to a power of two."""

    decode: bool
    query_tokens: int
    rows: int
    samples: int
    kv_tokens: int = 0
    longest_keys: tuple[int, ...] = ()


class PaddedBatch(NamedTuple):
    """`batch`: padded rows last."""

    batch: ForwardBatch
    key: GraphKey


@dataclass(frozen=True)
class Padding:
    """`max_tokens`: the token budget, `max_requests`: the request cap; `cache_tokens`: the cache budget."""

    geometry: CacheGeometry
    max_tokens: int
    max_requests: int
    cache_tokens: int
    q_interval: int = 64
    kv_interval: int = 16384

    @property
    def max_rows(self) -> int:
        """Of a padded batch: one more than of requests."""
        return self.max_requests + 1

    def query_tokens(self, count: int) -> int:
        return round_up(count, self.q_interval, self.max_tokens)

    def kv_tokens(self, count: int) -> int:
        return round_up(count, self.kv_interval, self.cache_tokens)

    def requests(self, count: int) -> int:
        return max(count, min(power_of_two(count), self.max_requests))

    def pad(self, batch: ForwardBatch) -> PaddedBatch:
        key = self._decode_key(batch) if is_decode(batch) else self._key(batch)
        missing = key.query_tokens - batch.num_tokens
        counts = [1] * missing if key.decode else [missing] if missing else []
        return PaddedBatch(ForwardBatch([*batch.rows, *self._padded_rows(counts)]), key)

    def _decode_key(self, batch: ForwardBatch) -> GraphKey:
        total = self.requests(len(batch.rows))
        return GraphKey(decode=True, query_tokens=total, rows=total, samples=total if batch.num_samples else 0)

    def _key(self, batch: ForwardBatch) -> GraphKey:
        keys = [[keys_of(row, group) for row in batch.rows] for group in self.geometry.groups]
        samples = batch.num_samples
        return GraphKey(
            decode=False,
            query_tokens=self.query_tokens(batch.num_tokens),
            rows=min(power_of_two(len(batch.rows) + 1), self.max_rows),
            samples=min(power_of_two(samples), self.max_requests) if samples else 0,
            kv_tokens=self.kv_tokens(max(sum(of_group) for of_group in keys)),
            longest_keys=tuple(max(MIN_LONGEST_KEY, power_of_two(max(of_group))) for of_group in keys),
        )

    def _padded_rows(self, counts: Sequence[int]) -> list[BatchRow]:
        """Of so many tokens each."""
        sinks = [WRITE_PADDING_CHUNK * blocks for blocks in self.geometry.blocks_per_chunk]
        size = self.geometry.page_size
        return [BatchRow("", 0, [0] * count, [[sink] * -(-count // size) for sink in sinks]) for count in counts]


def is_decode(batch: ForwardBatch) -> bool:
    """Whether a decode kernel can run it: one query a row. A prompt of one token is such a row too."""
    return all(len(row.tokens) == 1 for row in batch.rows)


def keys_of(row: BatchRow, group: LayerGroup) -> int:
    """Keys that the row's queries see in a layer of the group."""
    if group.window is None:
        return row.end
    return len(row.tokens) + min(row.start, group.window - 1)


def round_up(count: int, interval: int, cap: int) -> int:
    """To a multiple of `interval`, at least one; to `cap` where that is less, but never below `count`."""
    return max(count, min(max(1, -(-count // interval)) * interval, cap))


def power_of_two(count: int) -> int:
    """The smallest that is at least `count`, which is at least 1."""
    return 1 << (count - 1).bit_length()
