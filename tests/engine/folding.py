"""A device that computes little but believes nothing: its tokens depend on every KV word that it reads from the pages.

The word of a token is a checksum over the token, its position and the word before it, kept in the page slot where the
token's KV belongs. The next token is a checksum over all words that attention would see. `expected` computes the same
from the tokens alone, without pages, blocks or batches: so a page that is wrong, stale, missing or somebody else's
changes the tokens.
"""

import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from engine.cache_pool import CachePool
from engine.forward_batch import PLACEHOLDER, BatchRow, ForwardBatch
from engine.geometry import LayerGroup
from engine.progress import ProgressWord
from engine.runner import ForwardResult, Runner, SampledToken

VOCAB = 97


def word_of(before: int, token: int, position: int) -> int:
    return zlib.crc32(f"{token} {position}".encode(), before)


def next_token(words: Sequence[npt.NDArray[np.uint32]], seed: int) -> int:
    """`words`: those that each layer group sees."""
    return zlib.crc32(b"".join(w.tobytes() for w in words), seed & 0xFFFF) % VOCAB


def words_of(tokens: Sequence[int]) -> npt.NDArray[np.uint32]:
    words, word = [], 0
    for position, token in enumerate(tokens):
        word = word_of(word, token, position)
        words.append(word)
    return np.array(words, dtype=np.uint32)


def expected(
    prompt: Sequence[int], count: int, groups: Sequence[LayerGroup], ends: frozenset[int], seed: int = 0
) -> list[int]:
    """What a request must generate, from its tokens alone."""
    tokens: list[int] = list(prompt)
    for _ in range(count):
        words = words_of(tokens)
        tokens.append(next_token([words if g.window is None else words[-g.window :] for g in groups], seed))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


class FoldingRunner(Runner):
    """Runs each forward as late as it may: when its result is asked for. So one that was launched before pages changed
    hands sees them as a device would that is one step behind."""

    def __init__(self, pool: CachePool, progress: ProgressWord) -> None:
        self.forwards = 0
        self._geometry = pool.geometry
        self._pages = [pool.pages(g).numpy().view(np.uint32) for g in range(len(pool.geometry.groups))]
        self._progress = progress
        self._queue: deque[LateForward] = deque()
        self._previous: list[int] = []

    def launch(self, batch: ForwardBatch) -> "LateForward":
        rows = [replace(row, tables=[list(table) for table in row.tables]) for row in batch.rows]
        forward = LateForward(self, rows)
        self._queue.append(forward)
        assert len(self._queue) <= 2
        return forward

    def close(self) -> None:
        assert not self._queue

    def run_until(self, forward: "LateForward") -> None:
        while forward.outcome is None:
            self._queue[0].outcome = self._run(self._queue[0].rows)
            self._queue.popleft()

    def write(self, tables: Sequence[Sequence[int]], position: int, word: int) -> None:
        for group, pages in enumerate(self._pages):
            block, slot = self._place(group, tables[group], position)
            pages[block, :, 0, 0, slot, 0] = word

    def _run(self, rows: Sequence[BatchRow]) -> ForwardResult:
        self.forwards += 1
        started, sampled = time.monotonic_ns(), []
        for row in rows:
            for position, token in enumerate(row.tokens, row.start):
                if token == PLACEHOLDER:
                    token = self._previous[row.carry]
                before = int(self._read(row.tables, position)[0][-1]) if position else 0
                self.write(row.tables, position, word_of(before, token, position))
            if row.sample is not None:
                sampled.append(next_token(self._read(row.tables, row.end), row.sample.seed))
        for _ in range(self._geometry.layers):
            self._progress.advance()
        self._previous = sampled
        return ForwardResult([SampledToken(token) for token in sampled], started, time.monotonic_ns())

    def _read(self, tables: Sequence[Sequence[int]], end: int) -> list[npt.NDArray[np.uint32]]:
        """The words of the tokens before `end`, by group, as far back as the group sees. Every layer holds the same."""
        seen = []
        for group, pages in enumerate(self._pages):
            window = self._geometry.groups[group].window or end
            places = [self._place(group, tables[group], p) for p in range(max(0, end - window), end)]
            words = np.array([pages[block, :, 0, 0, slot, 0] for block, slot in places], dtype=np.uint32)
            assert (words == words[:, :1]).all(), "layers disagree"
            seen.append(words[:, 0])
        return seen

    def _place(self, group: int, table: Sequence[int], position: int) -> tuple[int, int]:
        window = self._geometry.groups[group].window
        slot = position if window is None else position % window
        return table[slot // self._geometry.page_size], slot % self._geometry.page_size


class LateForward:
    def __init__(self, runner: FoldingRunner, rows: Sequence[BatchRow]) -> None:
        self.rows = rows
        self.outcome: ForwardResult | None = None
        self._runner = runner

    def result(self) -> ForwardResult:
        self._runner.run_until(self)
        assert self.outcome is not None
        return self.outcome
