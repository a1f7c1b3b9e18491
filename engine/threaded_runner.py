"""Asynchronous batching on a CPU: one thread runs the forwards while the engine's thread schedules the next one."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from engine.forward_batch import ForwardBatch
from engine.model_runner import ModelRunner
from engine.runner import ForwardResult, Runner

MAX_UNDER_WAY = 2


class ThreadedRunner(Runner):
    """`launch` prepares a batch on the caller's thread and leaves the forward to the worker, which runs them in order.
    Tokens carried from one forward to the next are filled in by the worker. The progress word is then written by the
    worker, and by it alone. The thread starts with the first launch and ends with `close`."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")
        self._under_way: list[Future[ForwardResult]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def launch(self, batch: ForwardBatch) -> "Future[ForwardResult]":
        self._under_way = [forward for forward in self._under_way if not forward.done()]
        assert len(self._under_way) < MAX_UNDER_WAY, "a third forward was launched before the first had ended"
        prepared = self._runner.prepare(batch)
        forward = self._worker.submit(self._runner.forward, prepared)
        self._under_way.append(forward)
        return forward

    def close(self) -> None:
        """Waits for what is under way. May be called again."""
        self._worker.shutdown(wait=True)
        self._runner.close()
