"""Pages whose words say what they hold: real pools and block tables, no model.

A page of a layer is one 64-bit word, its *tag*: which prompt, which page of it, which layer. A prefill engine writes
tags; whatever lands on a decode node is compared with the block tables there, and what is decoded from is compared with
what should have come.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.cache_manager import CacheManager
from engine.cache_pool import CachePool
from engine.geometry import full_geometry
from engine.ledger import check
from engine.prefix_cache import PrefixCache
from engine.prefix_lookup import PrefixLookup
from engine.request import Owner, Request
from protocol.layout import full_layout
from tests.simulation.errors import Violation
from tests.simulation.script import LAYERS, PAGE

LAYOUT = full_layout(layers=LAYERS, kv_heads=1, page_size=PAGE, head_dim=1, dtype="float16")
GEOMETRY = full_geometry(LAYOUT)
WORD = 8
assert LAYOUT.page_bytes == WORD
NOTHING = 0
MAX_PAGES = 1 << 16


class Tag(NamedTuple):
    """What a page holds. `family`: of the prompt; those of one family hold the same."""

    family: int
    page: int
    layer: int

    @property
    def word(self) -> int:
        return (self.family * MAX_PAGES + self.page) * LAYERS + self.layer + 1


def tag_of(word: int) -> Tag | None:
    """None for what nobody wrote."""
    if word == NOTHING:
        return None
    rest, layer = divmod(word - 1, LAYERS)
    return Tag(*divmod(rest, MAX_PAGES), layer)


def family_of(request: Request) -> int:
    return request.prompt[0]


class Pages:
    """One node's pool with its block tables, and a look at its words. Free pages are empty, but for those that are kept
    for later hits. `shared`: there are such."""

    def __init__(self, blocks: int, shared: bool) -> None:
        self.pool = CachePool(GEOMETRY, -(-blocks // GEOMETRY.blocks_per_chunk[0]))
        self._prefix = PrefixCache("most_recent") if shared else None
        self.cache = CacheManager(self.pool, self._prefix, clock=lambda: 0.0)
        self.lookup = PrefixLookup(self.cache)
        self.address = self.pool.address
        self.on_free: Callable[[Owner, Sequence[int]], None] = lambda owner, blocks: None
        self._words = (ctypes.c_uint64 * (self.pool.bytes // WORD)).from_address(self.address)
        self._kept: set[int] = set()

    def place(self, address: int) -> tuple[int, int]:
        """(block, layer)"""
        return divmod((address - self.address) // WORD, LAYERS)

    def addresses(self, block: int) -> list[int]:
        return [self.address + (block * LAYERS + layer) * WORD for layer in range(LAYERS)]

    def table(self, owner: Owner) -> list[int]:
        return self.cache.tables(owner)[0]

    def hold(self, request: Request, tokens: int, hits: Sequence[int]) -> list[int]:
        """Its table: after `hits`, empty pages, or somebody wrote where nothing was his."""
        self.cache.hold(request.owner, tokens, hits)
        table = self.table(request.owner)
        for block in table[len(hits) :]:
            if block in self._kept:
                self._empty(block)
            for layer in range(LAYERS):
                if found := self.read(block, layer):
                    raise Violation(f"block {block}, now of {request.owner}, was free but holds {found}")
        return table

    def register(self, request: Request, start: int, end: int) -> None:
        """The KV of tokens [start, end) is there."""
        replaced = self.lookup.register(request, start, end)
        if replaced is not None:
            self.cache.give_back(replaced)
            self._emptied(replaced.owner, replaced.tables[0])

    def release(self, owner: Owner) -> None:
        blocks = list(self.table(owner))
        self.cache.release(owner)
        self._emptied(owner, blocks)

    def write(self, block: int, tag: Tag) -> None:
        self._words[block * LAYERS + tag.layer] = tag.word

    def read(self, block: int, layer: int) -> Tag | None:
        return tag_of(self._words[block * LAYERS + layer])

    def check(self) -> None:
        check(self.cache)

    def _emptied(self, owner: Owner, blocks: Sequence[int]) -> None:
        """They have one user fewer."""
        free = [block for block in blocks if self._prefix is None or not self._is_known(block)]
        self._kept |= set(blocks) - set(free)
        self.on_free(owner, blocks)
        for block in free:
            self._empty(block)

    def _is_known(self, block: int) -> bool:
        assert self._prefix is not None
        return block in self._prefix.users()

    def _empty(self, block: int) -> None:
        self._kept.discard(block)
        for layer in range(LAYERS):
            self._words[block * LAYERS + layer] = NOTHING
