"""The seam between the prefill engine and the messenger: calls one way, announcements the other.

The sender's calls are carried to the engine's thread, in order. The engine's announcements are carried to the pump's
thread; `before_forward` waits until the chunk's writes are armed, so that no layer can pass before they are.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from engine.engine import Engine
from engine.errors import CapacityExceeded, InvalidRequest, LoopStopped
from engine.loop import EngineLoop
from engine.outputs import PrefillChunk, StepOutput
from engine.request import Request
from kv_messenger.pump import Pump
from kv_messenger.sender import Sender
from kv_messenger.sender_transfer import Chunk
from protocol.gates import Gates
from protocol.messages import Failure, FailureCode
from protocol.sampling import SamplingParams

_NEVER_SAMPLES = SamplingParams(max_new_tokens=0)


class PrefillEngine:
    """The engine, as the sender sees it. `max_queue`: prompts that may wait. `draining` refuses new ones."""

    def __init__(self, loop: EngineLoop, max_queue: int) -> None:
        self._loop = loop
        self._pump: Pump | None = None
        self._max_queue = max_queue
        self.draining = False

    def refuse_through(self, pump: Pump) -> None:
        """`refused` callbacks run on the pump's thread, as all of the sender does."""
        self._pump = pump

    def submit(self, request_id: str, tokens: Sequence[int], refused: Callable[[Failure], None]) -> None:
        self._post(lambda engine: self._add(engine, request_id, tokens, refused))

    def abort(self, request_id: str) -> None:
        self._post(lambda engine: engine.abort(request_id))

    def release(self, request_id: str) -> None:
        self._post(lambda engine: engine.release(request_id))

    def _post(self, call: Callable[[Engine], object]) -> None:
        """Dropped once the engine's thread has ended, and the node is about to."""
        with suppress(LoopStopped):
            self._loop.post(call)

    def _add(self, engine: Engine, request_id: str, tokens: Sequence[int], refused: Callable[[Failure], None]) -> None:
        failure = self._try_to_add(engine, request_id, tokens)
        if failure is not None and self._pump is not None:
            self._pump.submit(lambda: refused(failure))

    def _try_to_add(self, engine: Engine, request_id: str, tokens: Sequence[int]) -> Failure | None:
        if self.draining:
            return Failure(FailureCode.DRAINING, "this prefill node is stopping")
        if engine.waiting >= self._max_queue:
            return Failure(FailureCode.OVERLOADED, f"{engine.waiting} prompts wait already")
        try:
            engine.add(Request(request_id, list(tokens), _NEVER_SAMPLES, prefill_only=True))
        except InvalidRequest as error:
            return Failure(FailureCode.INVALID, str(error)[:1000])
        except CapacityExceeded as error:
            return Failure(FailureCode.TOO_LONG, str(error)[:1000])
        return None


class ChunkAnnouncer:
    """The engine's listener; every method runs on the engine's thread."""

    def __init__(self, pump: Pump, sender: Sender, gates: Gates) -> None:
        self._pump = pump
        self._sender = sender
        self._gates = gates

    def before_forward(self, chunks: Sequence[PrefillChunk]) -> None:
        for chunk in chunks:
            self._gates.wait(f"prefill:from={chunk.start}")
        named = [(c.request_id, Chunk(c.start, c.end, c.tables, c.first_threshold, c.context_slot)) for c in chunks]
        self._pump.call(lambda: self._sender.on_chunks(named))

    def forward_ended(self, chunks: Sequence[PrefillChunk], started_ns: int, ended_ns: int) -> None:
        ids = [chunk.request_id for chunk in chunks]
        self._pump.submit(lambda: self._sender.on_forward_ended(ids, started_ns, ended_ns))

    def forward_failed(self, chunks: Sequence[PrefillChunk], error: str) -> None:
        """Waits until the chunk's writes are cancelled: no later forward may set them off."""
        failure = Failure(FailureCode.INTERNAL, f"prefill failed: {error}"[:1000])

        def stop() -> None:
            for chunk in chunks:
                self._sender.on_engine_failed(chunk.request_id, failure)

        self._pump.call(stop)

    def on_step(self, output: StepOutput) -> None:
        """A prompt that the engine gave up by itself: tell its decode node."""
        for ended in output.ended:
            if ended.failure is not None:
                self._pump.submit(partial(self._sender.on_engine_failed, ended.request_id, ended.failure))
