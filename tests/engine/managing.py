"""Managers in tests: requests, results, and an engine whose forwards wait to be let through."""

import threading

from engine.forward_batch import ForwardBatch
from engine.generation_output import GenerationOutput, GenerationRequest
from engine.manager import ContinuousBatchingManager
from engine.request import RequestStatus
from protocol.sampling import SamplingParams
from tests.engine.traces import Harness

DEADLINE_S = 20.0

FINISHED, FAILED, CANCELLED = RequestStatus.FINISHED, RequestStatus.FAILED, RequestStatus.CANCELLED


def asked(request_id: str | None, prompt: int = 4, new: int = 5, streaming: bool = False) -> GenerationRequest:
    """For `new` tokens after a prompt of `prompt` distinct ones."""
    return GenerationRequest(
        prompt_ids=list(range(2, 2 + prompt)),
        sampling=SamplingParams(max_new_tokens=new),
        request_id=request_id,
        streaming=streaming,
    )


class Gate:
    """Lets the engine's thread into its forwards one by one."""

    def __init__(self, harness: Harness) -> None:
        self.waiting = threading.Semaphore(0)
        self._allowed = threading.Semaphore(0)
        harness.runner.on_run = self._wait

    def _wait(self, _: ForwardBatch) -> None:
        self.waiting.release()
        assert self._allowed.acquire(timeout=DEADLINE_S)

    def reached(self) -> None:
        """The engine's thread is inside a forward that it was not in before."""
        assert self.waiting.acquire(timeout=DEADLINE_S)

    def let(self, forwards: int) -> None:
        self._allowed.release(forwards)


def positions(_: str, position: int) -> int:
    """Each token says where it stands."""
    return position


def result(manager: ContinuousBatchingManager, request_id: str) -> GenerationOutput:
    output = manager.get_result(request_id, DEADLINE_S)
    assert output is not None, f"nothing of {request_id} in time"
    return output
