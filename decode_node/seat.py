"""One engine of a decode node: its thread, its admission, and the calls that reach both from other threads."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from decode_node.admission import Admission
from engine.engine import Engine
from engine.errors import LoopStopped
from engine.loop import EngineLoop
from kv_messenger.attempts import Arrival
from protocol.messages import Failure, PrefillTimes
from protocol.ticket import TransferKey


class Seat:
    """The messenger's target owner: what comes from the pump's thread is carried to the engine's. `admission` is set
    once, before anything starts."""

    def __init__(self, engine: Engine) -> None:
        self.loop = EngineLoop(engine, on_step=lambda output: self.admission.on_step(output))
        self._admission: Admission | None = None

    @property
    def admission(self) -> Admission:
        assert self._admission is not None, "the seat is not taken yet"
        return self._admission

    def take(self, admission: Admission) -> None:
        self._admission = admission

    def post(self, call: Callable[[Admission], None]) -> None:
        """On the engine's thread; dropped once that has ended, and the node is about to."""
        with suppress(LoopStopped):
            self.loop.post(lambda _: call(self.admission))

    def submit(self, call: Callable[[Admission], None]) -> "Future[None]":
        """As `post`, to be waited for."""
        return self.loop.submit(lambda _: call(self.admission))

    def kv_arrived(self, arrival: Arrival) -> None:
        self.post(lambda admission: admission.kv_arrived(arrival))

    def kv_failed(self, key: TransferKey, failure: Failure) -> None:
        self.post(lambda admission: admission.kv_failed(key, failure))

    def pages_safe(self, key: TransferKey) -> None:
        self.post(lambda admission: admission.pages_safe(key))

    def prefill_timed(self, key: TransferKey, times: PrefillTimes) -> None:
        self.post(lambda admission: admission.prefill_timed(key, times))
