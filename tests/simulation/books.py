"""Pages whose words say whose they are, and the two engines over them: real block tables, no model.

A page of a layer is one 64-bit word, its *tag*: which prompt, which page of it, which layer. A prefill engine writes
tags; whatever lands on a decode node is compared with the block tables there, and what is decoded from is compared with
what should have come.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.cache_manager import CacheManager
from engine.cache_pool import CachePool
from engine.engine import Reservation
from engine.errors import CapacityExceeded, InvalidRequest
from engine.geometry import full_geometry
from engine.ledger import check
from engine.outputs import Ended, NewToken, StepOutput
from engine.prefix_cache import PrefixCache
from engine.prefix_lookup import PrefixLookup
from engine.request import Owner, Request
from protocol.layout import KVLayout, full_layout
from protocol.messages import FinishReason
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


class DecodingEngine:
    """What `Admission` needs of an engine. Each step gives every running request one token. Further sequences of a
    prompt run beside it once its KV is there, and take no pages."""

    def __init__(self, pages: Pages, max_tokens: int) -> None:
        self.layout: KVLayout = LAYOUT
        self.pages = pages
        self._max_tokens = max_tokens
        self._waiting: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._ended: list[Ended] = []
        self._cached: dict[Owner, int] = {}
        """Pages that were there already, of those whose pages a peer may write to."""

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._ended)

    def is_running(self, request_id: str) -> bool:
        return request_id in self._running

    def validate(self, request: Request) -> None:
        if request.id in self._waiting or request.id in self._running:
            raise InvalidRequest(f"request {request.id} is running already")
        if self.pages.cache.holds(request.owner):
            raise InvalidRequest(f"pages of {request.owner} are still in quarantine")
        if len(request.prompt) > self._max_tokens:
            raise CapacityExceeded(f"{len(request.prompt)} tokens can never fit")

    def can_reserve(self, request: Request) -> bool:
        return self.pages.cache.can_hold(request.owner, len(request.prompt), self.pages.lookup.hits(request))

    def reserve(self, request: Request) -> Reservation:
        self.validate(request)
        hits, whole = self.pages.lookup.hits(request), self.pages.lookup.holds_prompt(request)
        self._waiting[request.id] = request
        self._cached[request.owner] = len(hits)
        table = list(self.pages.hold(request, len(request.prompt), hits))
        return Reservation(tables=[table], cached=len(hits), whole=whole, context_slot=None)

    def add(self, request: Request) -> None:
        """Its prompt runs here. Where there is no room it takes none: a token needs a page only in a real engine."""
        self.validate(request)
        self._run(request)

    def resume(self, request_id: str, computed: int) -> None:
        """Raises Violation unless the KV of `computed` tokens is there, and no other's."""
        request = self._waiting.pop(request_id)
        table = self.pages.table(request.owner)
        del self._cached[request.owner]
        for page in range(-(-computed // PAGE)):
            for layer in range(LAYERS):
                found = self.pages.read(table[page], layer)
                if found != Tag(family_of(request), page, layer):
                    raise Violation(f"{request.owner} is decoded from {found} as its page {page} of layer {layer}")
        self.pages.register(request, 0, computed)
        self._run(request)

    def quarantine(self, request_id: str) -> None:
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self.pages.cache.quarantine(request.owner)

    def free_quarantined(self, request_id: str, attempt: int) -> None:
        owner = Owner(request_id, attempt)
        if self.pages.cache.is_quarantined(owner):
            del self._cached[owner]
            self.pages.release(owner)

    def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._end(self._running[request_id], FinishReason.CANCELLED)

    def step(self) -> StepOutput:
        tokens = []
        for request in list(self._running.values()):
            tokens.append(NewToken(request.id, request.generated, 7))
            request.tokens.append(7)
            if request.generated >= request.sampling.max_new_tokens:
                self._end(request, FinishReason.LENGTH)
        ended, self._ended = self._ended, []
        return StepOutput(tokens, ended)

    def place_of(self, owner: Owner, page: int) -> int | None:
        """The block that a peer may write this page to; None if it may not, or not any more."""
        cached = self._cached.get(owner)
        if cached is None or page < cached:
            return None
        table = self.pages.table(owner)
        index = page - cached if self.pages.cache.is_quarantined(owner) else page
        return table[index] if index < len(table) else None

    def _run(self, request: Request) -> None:
        self._running[request.id] = request
        for name in request.child_ids():
            self._running[name] = Request(name, request.prompt, request.sampling, attempt=request.attempt)

    def _end(self, request: Request, reason: FinishReason) -> None:
        del self._running[request.id]
        self._ended.append(Ended(request.id, reason, None, request.generated))
        self.pages.release(request.owner)


class ComputingEngine:
    """What the prefill node's port needs of an engine: prompts that wait, run in chunks, and keep their pages until
    they are released. Its thread asks for forwards and plays them layer by layer."""

    def __init__(self, pages: Pages, chunk_tokens: int, max_tokens: int) -> None:
        self.pages = pages
        self._chunk_tokens = chunk_tokens
        self._max_tokens = max_tokens
        self._queue: deque[Request] = deque()
        self._active: list[Request] = []
        self._kept: dict[str, Request] = {}

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._active)

    @property
    def at_rest(self) -> bool:
        return not (self._queue or self._active or self._kept)

    def add(self, request: Request) -> None:
        if request.id in self._kept:
            raise InvalidRequest(f"request {request.id} is running already")
        if len(request.prompt) > self._max_tokens:
            raise CapacityExceeded(f"{len(request.prompt)} tokens can never fit")
        self._kept[request.id] = request
        self._queue.append(request)

    def abort(self, request_id: str) -> None:
        """It runs no more, and keeps its pages."""
        self._queue = deque(request for request in self._queue if request.id != request_id)
        self._active = [request for request in self._active if request.id != request_id]

    def release(self, request_id: str) -> None:
        self.abort(request_id)
        request = self._kept.pop(request_id, None)
        if request is not None:
            self.pages.release(request.owner)

    def schedule(self) -> list[tuple[Request, int, int]]:
        """The next forward: (request, start, end) for each that is in it, at most two."""
        while self._queue and self._start(self._queue[0]):
            self._active.append(self._queue.popleft())
        chunks = []
        for request in self._active[:2]:
            end = min(len(request.prompt), request.computed + self._chunk_tokens)
            chunks.append((request, request.computed, end))
        return chunks

    def _start(self, request: Request) -> bool:
        """False if there is no room now."""
        hits = self.pages.lookup.hits(request)
        if not self.pages.cache.can_hold(request.owner, len(request.prompt), hits):
            return False
        self.pages.hold(request, len(request.prompt), hits)
        request.computed = len(hits) * PAGE
        return True

    def compute(self, request: Request, start: int, end: int, layer: int) -> None:
        """The KV of one layer of a chunk. A page has its tag once its last token is there: no sooner may it leave."""
        table = self.pages.table(request.owner)
        whole = -(-end // PAGE) if end == len(request.prompt) else end // PAGE
        for page in range(start // PAGE, whole):
            self.pages.write(table[page], Tag(family_of(request), page, layer))

    def computed(self, request: Request, end: int) -> None:
        """A forward that held it has ended."""
        self.pages.register(request, request.computed, end)
        request.computed = end
        if end >= len(request.prompt) and request in self._active:
            self._active.remove(request)

    def give_up(self, request: Request) -> None:
        """A forward that held it has failed."""
        self.abort(request.id)
