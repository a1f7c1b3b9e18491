"""Which full blocks hold which prefix: content by chained hash, reference counts, and what is kept without a user.

A registered block is in use (references > 0) or initialised (none: kept for a later hit, and free to be taken).
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

HASH_BYTES = 16
"""128 bits: a collision is out of reach, so a hit's tokens are not compared again."""

EvictionPolicy = Literal["most_recent", "lru", "all"]


def root_hash(namespace: str, salt: str = "") -> bytes:
    """The parent of a first block. `namespace`: whatever changes KV besides the tokens, such as weights and dtype."""
    return blake2b(f"{namespace}\0{salt}".encode(), digest_size=HASH_BYTES).digest()


def block_hashes(parent: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Of full blocks whose predecessors hash to `parent`, each chained to the one before: equal content elsewhere
    hashes differently."""
    content = array("i", tokens)
    data, length = content.tobytes(), page_size * content.itemsize
    hashes = []
    for start in range(0, len(data) - length + 1, length):
        parent = blake2b(parent + data[start : start + length], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


class CacheEvent(NamedTuple):
    """For a router that wants to know what is held where: hashes that can be hit now, or no longer."""

    hashes: list[bytes]
    stored: bool


@dataclass
class PrefixCounters:
    """Monotone, in blocks. `queries`: looked up by requests that were then scheduled; `hits` of them were found."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0
    duplicates: int = 0


class PrefixCache:
    """Knows blocks by number only. `policy` orders the eviction of initialised blocks; within one request they are
    released first to last, so "most_recent" takes the tails of chains before their heads."""

    def __init__(self, policy: EvictionPolicy, namespace: str = "") -> None:
        self.counters = PrefixCounters()
        self.events: list[CacheEvent] = []
        self._policy = policy
        self._namespace = namespace
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._references: dict[int, int] = {}
        self._initialised: OrderedDict[int, None] = OrderedDict()

    @property
    def initialised(self) -> int:
        return len(self._initialised)

    def root(self, salt: str) -> bytes:
        return root_hash(self._namespace, salt)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix. Nothing is taken: `pin` them before anybody can evict them."""
        blocks: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_initialised(self, blocks: Iterable[int]) -> int:
        return sum(block in self._initialised for block in blocks)

    def pin(self, blocks: Iterable[int]) -> None:
        """One more user of each."""
        for block in blocks:
            self._references[block] += 1
            self._initialised.pop(block, None)

    def register(self, blocks: Sequence[int], digests: Sequence[bytes], may_replace: bool) -> list[int]:
        """Each block is complete, and used once. Returns the blocks that hold this content from now on: if
        `may_replace`, then where it was known already another one, with one more user. A block whose content another
        one holds is not registered."""
        kept, stored = [], []
        for block, digest in zip(blocks, digests, strict=True):
            holder = self._block_of.setdefault(digest, block)
            if holder == block:
                self._hash_of[block] = digest
                self._references[block] = 1
                stored.append(digest)
            elif may_replace:
                self.counters.duplicates += 1
                self.pin([holder])
            kept.append(holder if may_replace else block)
        if stored:
            self.events.append(CacheEvent(stored, stored=True))
        return kept

    def release(self, blocks: Iterable[int], keep: bool) -> list[int]:
        """One user fewer of each, in order. Returns those that are plain free now: they were not registered, or nobody
        uses them and they are not to be kept."""
        plain, unused = [], []
        for block in blocks:
            users = self._references.get(block)
            if users is None:
                plain.append(block)
                continue
            self._references[block] = users - 1
            if users == 1 and keep:
                self._initialised[block] = None
            elif users == 1:
                plain.append(block)
                unused.append(block)
        self._forget(unused)
        return plain

    def evict(self, count: int) -> list[int]:
        """At least `count` initialised blocks, which are plain free from now on."""
        assert count <= len(self._initialised), f"{count} initialised blocks wanted of {len(self._initialised)}"
        if self._policy == "all":
            count = len(self._initialised)
        newest = self._policy != "lru"
        blocks = [self._initialised.popitem(last=newest)[0] for _ in range(count)]
        self.counters.evictions += count
        self._forget(blocks)
        return blocks

    def users_of(self, block: int) -> int:
        """0 for a block that is not registered: it has one user at most, which is not counted here."""
        return self._references.get(block, 0)

    def users(self) -> dict[int, int]:
        """Users of each registered block, for checks."""
        return dict(self._references)

    def initialised_blocks(self) -> list[int]:
        return list(self._initialised)

    def _forget(self, blocks: Sequence[int]) -> None:
        if blocks:
            digests = [self._hash_of.pop(block) for block in blocks]
            for block, digest in zip(blocks, digests, strict=True):
                del self._block_of[digest], self._references[block]
            self.events.append(CacheEvent(digests, stored=False))
