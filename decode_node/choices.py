"""The choices of a node's requests: as what the engine knows each of them, and what the router hears of it."""

from collections.abc import Callable

from decode_node.job import Job
from engine.outputs import Ended, NewToken
from protocol.messages import ChoiceEnded, FinishReason, Message, TokenDelta


class Choices:
    """Those that have not ended. To the engine each is a request, whose id only this file leads back to its job."""

    def __init__(self, reply: Callable[[Message], None]) -> None:
        self._reply = reply
        self._living: dict[str, tuple[Job, int]] = {}

    def open(self, job: Job) -> None:
        request = job.next_request()
        for index, name in enumerate((request.id, *request.child_ids())):
            job.living[index] = name
            self._living[name] = (job, index)

    def pass_on(self, new: NewToken) -> Job | None:
        """To the router. None: its request is over."""
        choice = self._living.get(new.request_id)
        if choice is None:
            return None
        job, index = choice
        self._reply(TokenDelta(request=job.id, choice=index, index=new.index, tokens=[new.token]))
        return job

    def end(self, ended: Ended) -> Job | None:
        """The job, if this is its end: it was the last choice, or it failed, and the others with it."""
        job, index = self._living.pop(ended.request_id, (None, 0))
        if job is None:
            return None
        del job.living[index]
        if not job.living or ended.reason is FinishReason.ERROR:
            return job
        self._reply(ChoiceEnded(request=job.id, choice=index, reason=ended.reason))
        return None

    def close(self, job: Job) -> list[str]:
        """The job is over: what the engine calls those of its choices that had not ended."""
        names, job.living = list(job.living.values()), {}
        for name in names:
            del self._living[name]
        return names
