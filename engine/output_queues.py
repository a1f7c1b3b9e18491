"""Where outputs wait for whoever wants them: one queue per request, so that nobody takes another's."""

import threading
from collections import deque
from collections.abc import Iterator

from engine.errors import UnknownRequest
from engine.generation_output import GenerationOutput
from engine.snapshot import Snapshot


class _Queue:
    """`changed` shares the lock of all queues."""

    def __init__(self, lock: threading.Lock) -> None:
        self.outputs: deque[Snapshot] = deque()
        self.changed = threading.Condition(lock)


class OutputQueues:
    """Thread-safe. A queue is there from `open` until its terminal output was taken. Each output is taken once, by
    whoever asks first: for that request, or for any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queues: dict[str, _Queue] = {}
        self._filled: dict[str, None] = {}
        """Ids that have an output to take, the next one to serve first."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._queues

    def open(self, request_id: str) -> bool:
        """False if it is open already."""
        with self._lock:
            if request_id in self._queues:
                return False
            self._queues[request_id] = _Queue(self._lock)
            return True

    def close(self, request_id: str) -> None:
        """Outputs that were not taken are dropped, and later ones will be. Unknown ids are ignored."""
        with self._lock:
            if request_id in self._queues:
                self._remove(request_id)

    def put(self, snapshot: Snapshot) -> None:
        """Dropped if its queue is not open."""
        with self._lock:
            queue = self._queues.get(snapshot.request_id)
            if queue is not None:
                queue.outputs.append(snapshot)
                self._filled[snapshot.request_id] = None
                queue.changed.notify_all()
                self._changed.notify_all()

    def take(self, request_id: str, timeout_s: float | None = None) -> GenerationOutput | None:
        """Its next output; None if none comes in time. Raises UnknownRequest if its queue is not open, or is closed
        by another while this waits."""
        with self._lock:
            queue = self._open(request_id)
            queue.changed.wait_for(lambda: queue.outputs or self._queues.get(request_id) is not queue, timeout_s)
            if queue.outputs:
                return self._pop(request_id)
            if self._queues.get(request_id) is not queue:
                raise UnknownRequest(f"request {request_id!r}: another took its terminal output")
            return None

    def take_any(self, timeout_s: float | None = None) -> GenerationOutput | None:
        """The next output of any request; None if no queue is open, or none gets an output in time."""
        with self._lock:
            self._changed.wait_for(lambda: self._filled or not self._queues, timeout_s)
            return self._pop(next(iter(self._filled))) if self._filled else None

    def stream(self, request_id: str) -> Iterator[GenerationOutput]:
        """Its outputs, ending with the terminal one. Raises UnknownRequest at once, or as `take` does."""
        with self._lock:
            self._open(request_id)
        return self._stream(request_id)

    def _stream(self, request_id: str) -> Iterator[GenerationOutput]:
        terminal = False
        while not terminal:
            output = self.take(request_id)
            assert output is not None, "waited without a time-out"
            terminal = output.is_terminal
            yield output

    def _open(self, request_id: str) -> _Queue:
        queue = self._queues.get(request_id)
        if queue is None:
            raise UnknownRequest(f"request {request_id!r} is unknown here, or its terminal output was taken")
        return queue

    def _pop(self, request_id: str) -> GenerationOutput:
        queue = self._queues[request_id]
        snapshot = queue.outputs.popleft()
        del self._filled[request_id]
        if queue.outputs:
            self._filled[request_id] = None
        if snapshot.is_terminal:
            self._remove(request_id)
        return snapshot.output()

    def _remove(self, request_id: str) -> None:
        queue = self._queues.pop(request_id)
        queue.outputs.clear()
        self._filled.pop(request_id, None)
        queue.changed.notify_all()
        self._changed.notify_all()
