"""Pages whose words say whose they are, and the two engines over them: real block tables, no model.

A page of a layer is one 64-bit word, its *tag*: which attempt of which request, which page, which layer. A prefill
engine writes tags; whatever lands on a decode node is compared with the block tables there, and what is decoded from is
compared with what should have come.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.cache_manager import CacheManager, HoldingState
from engine.cache_pool import CachePool
from engine.engine import Reservation
from engine.errors import CapacityExceeded, InvalidRequest
from engine.forking import child_of
from engine.geometry import full_geometry
from engine.ledger import check
from engine.outputs import Ended, NewToken, StepOutput
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
    """`owner`: the prompt's name in the prefill engine, which is its transfer's."""

    owner: str
    page: int
    layer: int


class Tags:
    """Tags as words, and back."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._owners: list[str] = []

    def word(self, tag: Tag) -> int:
        number = self._numbers.get(tag.owner)
        if number is None:
            number = self._numbers[tag.owner] = len(self._owners)
            self._owners.append(tag.owner)
        return (number * MAX_PAGES + tag.page) * LAYERS + tag.layer + 1

    def tag(self, word: int) -> Tag | None:
        """None for what nobody wrote."""
        if word == NOTHING:
            return None
        rest, layer = divmod(word - 1, LAYERS)
        number, page = divmod(rest, MAX_PAGES)
        return Tag(self._owners[number], page, layer)


class Pages:
    """One node's pool with its block tables, and a look at its words. Free pages are empty."""

    def __init__(self, blocks: int, tags: Tags) -> None:
        self.tags = tags
        self.pool = CachePool(GEOMETRY, -(-blocks // GEOMETRY.blocks_per_chunk[0]))
        self.cache = CacheManager(self.pool, clock=lambda: 0.0)
        self.address = self.pool.address
        self.on_free: Callable[[Owner, Sequence[int]], None] = lambda owner, blocks: None
        self._words = (ctypes.c_uint64 * (self.pool.bytes // WORD)).from_address(self.address)

    def place(self, address: int) -> tuple[int, int]:
        """(block, layer)"""
        return divmod((address - self.address) // WORD, LAYERS)

    def addresses(self, block: int) -> list[int]:
        return [self.address + (block * LAYERS + layer) * WORD for layer in range(LAYERS)]

    def table(self, owner: Owner) -> list[int]:
        return self.cache.tables(owner)[0]

    def hold(self, owner: Owner, tokens: int) -> list[int]:
        """Empty pages, or somebody wrote where nothing was his."""
        self.cache.hold(owner, tokens)
        for page, block in enumerate(self.table(owner)):
            for layer in range(LAYERS):
                if word := self._words[block * LAYERS + layer]:
                    raise Violation(f"block {block}, page {page} of {owner}, was free but holds {self.tags.tag(word)}")
        return self.table(owner)

    def release(self, owner: Owner) -> None:
        blocks = list(self.table(owner))
        self.on_free(owner, blocks)
        self.cache.release(owner)
        for block in blocks:
            for layer in range(LAYERS):
                self._words[block * LAYERS + layer] = NOTHING

    def write(self, block: int, tag: Tag) -> None:
        self._words[block * LAYERS + tag.layer] = self.tags.word(tag)

    def read(self, block: int, layer: int) -> Tag | None:
        return self.tags.tag(self._words[block * LAYERS + layer])

    def check(self) -> None:
        check(self.cache)


class DecodingEngine:
    """What `Admission` needs of an engine. Each step gives every running request one token. Further sequences of a
    prompt run beside it once its KV is there, and take no pages."""

    def __init__(self, pages: Pages, name_of: Callable[[Owner], str], max_tokens: int) -> None:
        self.layout: KVLayout = LAYOUT
        self.pages = pages
        self._name_of = name_of
        self._max_tokens = max_tokens
        self._waiting: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._ended: list[Ended] = []

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
        return self.pages.cache.can_hold(request.owner, len(request.prompt))

    def reserve(self, request: Request) -> Reservation:
        self.validate(request)
        self._waiting[request.id] = request
        table = list(self.pages.hold(request.owner, len(request.prompt)))
        return Reservation(tables=[table], cached=0, whole=False, context_slot=None)

    def add(self, request: Request) -> None:
        """Its prompt runs here. Where there is no room it takes none: a token needs a page only in a real engine."""
        self.validate(request)
        self._run(request)

    def resume(self, request_id: str, computed: int) -> None:
        """Raises Violation unless all of `computed` tokens' KV is there, and is this attempt's."""
        request = self._waiting.pop(request_id)
        self._run(request)
        table, name = self.pages.table(request.owner), self._name_of(request.owner)
        for page in range(-(-computed // PAGE)):
            for layer in range(LAYERS):
                found = self.pages.read(table[page], layer)
                if found != Tag(name, page, layer):
                    raise Violation(f"{name} is decoded from {found} as its page {page} of layer {layer}")

    def quarantine(self, request_id: str) -> None:
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self.pages.cache.quarantine(request.owner)

    def free_quarantined(self, request_id: str, attempt: int) -> None:
        owner = Owner(request_id, attempt)
        if self.pages.cache.is_quarantined(owner):
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

    def owns(self, owner: Owner) -> bool:
        """Whether a peer may write into this owner's pages."""
        holding = next((h for h in self.pages.cache.holdings() if h.owner == owner), None)
        if holding is None:
            return False
        return holding.state is HoldingState.QUARANTINED or owner.request_id in self._waiting

    def _run(self, request: Request) -> None:
        family = [request, *(child_of(request, i) for i in range(1, request.n))]
        self._running.update({member.id: member for member in family})

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
        while self._queue and self.pages.cache.can_hold(self._queue[0].owner, len(self._queue[0].prompt)):
            request = self._queue.popleft()
            self.pages.hold(request.owner, len(request.prompt))
            self._active.append(request)
        chunks = []
        for request in self._active[:2]:
            end = min(len(request.prompt), request.computed + self._chunk_tokens)
            chunks.append((request, request.computed, end))
        return chunks

    def compute(self, request: Request, start: int, end: int, layer: int) -> None:
        """The KV of one layer of a chunk. A page has its tag once its last token is there: no sooner may it leave."""
        table = self.pages.table(request.owner)
        whole = -(-end // PAGE) if end == len(request.prompt) else end // PAGE
        for page in range(start // PAGE, whole):
            self.pages.write(table[page], Tag(request.id, page, layer))

    def computed(self, request: Request, end: int) -> None:
        """A forward that held it has ended."""
        request.computed = end
        if end >= len(request.prompt) and request in self._active:
            self._active.remove(request)

    def give_up(self, request: Request) -> None:
        """A forward that held it has failed."""
        self.abort(request.id)
