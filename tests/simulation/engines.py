"""The two engines over those pages, without a model: what admission needs of one, and the prefill node of the other."""

from collections import deque

from engine.engine import Reservation
from engine.errors import CapacityExceeded, InvalidRequest
from engine.outputs import Ended, NewToken, StepOutput
from engine.request import Owner, Request
from protocol.layout import KVLayout
from protocol.messages import FinishReason
from tests.simulation.books import Pages, Tag, family_of
from tests.simulation.contexts import Contexts, context_tag
from tests.simulation.errors import Violation
from tests.simulation.script import LAYERS, PAGE


class DecodingEngine:
    """What `Admission` needs of an engine. Each step gives every running request one token. Further sequences of a
    prompt run beside it once its KV is there, and take no pages."""

    def __init__(self, layout: KVLayout, pages: Pages, contexts: Contexts, max_tokens: int) -> None:
        self.layout = layout
        self.pages = pages
        self.contexts = contexts
        self._max_tokens = max_tokens
        self._waiting: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._ended: list[Ended] = []
        self._cached: dict[Owner, int] = {}
        """Pages that were there already, of those whose pages a peer may write to."""

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._ended)

    def validate(self, request: Request) -> None:
        if request.id in self._waiting or request.id in self._running:
            raise InvalidRequest(f"request {request.id} is running already")
        if self.pages.cache.holds(request.owner):
            raise InvalidRequest(f"pages of {request.owner} are still in quarantine")
        if len(request.prompt) > self._max_tokens:
            raise CapacityExceeded(f"{len(request.prompt)} tokens can never fit")

    def can_reserve(self, request: Request) -> bool:
        hits = self.pages.lookup.hits(request)
        return self.pages.cache.can_hold(request.owner, len(request.prompt), hits) and not self.contexts.wanting

    def reserve(self, request: Request) -> Reservation:
        self.validate(request)
        hits, whole = self.pages.lookup.hits(request), self.pages.lookup.holds_prompt(request)
        self._waiting[request.id] = request
        self._cached[request.owner] = len(hits)
        table = list(self.pages.hold(request, len(request.prompt), hits))
        slot = None if whole else self.contexts.take(request.owner)
        return Reservation(tables=[table], cached=len(hits), whole=whole, context_slot=slot)

    def add(self, request: Request) -> None:
        """Its prompt runs here. Where there is no room it takes none: a token needs a page only in a real engine."""
        self.validate(request)
        self._run(request)

    def resume(self, request_id: str, computed: int) -> None:
        """Raises Violation unless the KV of `computed` tokens is there, and no other's; their context, too."""
        request = self._waiting.pop(request_id)
        table = self.pages.table(request.owner)
        del self._cached[request.owner]
        for page in range(-(-computed // PAGE)):
            for layer in range(LAYERS):
                found = self.pages.read(table[page], layer)
                if found != Tag(family_of(request), page, layer):
                    raise Violation(f"{request.owner} is decoded from {found} as its page {page} of layer {layer}")
        if self.contexts.slot(request.owner) is not None:
            if (found := self.contexts.read(request.owner)) != context_tag(request, computed):
                raise Violation(f"{request.owner} has {found} for its context")
            self.contexts.give_back(request.owner)
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
            self.contexts.give_back(owner)
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

    def __init__(self, pages: Pages, contexts: Contexts, chunk_tokens: int, max_tokens: int) -> None:
        self.pages = pages
        self.contexts = contexts
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
            self.contexts.give_back(request.owner)
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
        if self.contexts.wanting or not self.pages.cache.can_hold(request.owner, len(request.prompt), hits):
            return False
        self.pages.hold(request, len(request.prompt), hits)
        self.contexts.take(request.owner)
        request.computed = len(hits) * PAGE
        return True

    def compute(self, request: Request, start: int, end: int, layer: int) -> None:
        """The KV of one layer of a chunk. A page has its tag once its last token is there: no sooner may it leave."""
        table = self.pages.table(request.owner)
        whole = -(-end // PAGE) if end == len(request.prompt) else end // PAGE
        for page in range(start // PAGE, whole):
            self.pages.write(table[page], Tag(family_of(request), page, layer))

    def leave_context(self, request: Request, end: int) -> None:
        """The last layer of a chunk is done: of the prompt's last one, the model has made its context."""
        if end == len(request.prompt):
            self.contexts.write(request.owner, context_tag(request, end))

    def computed(self, request: Request, end: int) -> None:
        """A forward that held it has ended."""
        self.pages.register(request, request.computed, end)
        request.computed = end
        if end >= len(request.prompt) and request in self._active:
            self._active.remove(request)

    def give_up(self, request: Request) -> None:
        """A forward that held it has failed."""
        self.abort(request.id)
