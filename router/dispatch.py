"""Which request runs on which node: sends it, routes what nodes say back to it, and ends it.

`Run` (in `run`) is a request's own side of this; membership and policy say where it may go.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from protocol.logs import event
from protocol.messages import Abort, DecodeRequest, Failure, FailureCode, Role, TokenDelta
from router.attempt import Attempt, FromNode
from router.membership import Member, Membership
from router.metrics import Metrics
from router.policy import able_decodes, address, rank_decodes, rank_prefills, why_unfed
from router.queueing import NOBODY, RequestFailed, RequestQueue
from router.token_request import TokenRequest
from router.tried import Tried

LOST = Failure(FailureCode.NODE_LOST, "The node that served the request is gone.")
REFUSED = Failure(FailureCode.INCOMPATIBLE, "The node does not serve such a request.")
STOPPING = Failure(FailureCode.DRAINING, "The router is stopping.")

log = logging.getLogger(__name__)


class Sender(Protocol):
    """How messages reach nodes; NodeChannel, or a fake."""

    def send(self, instance: str, message: msgspec.Struct) -> bool: ...


class Dispatcher:
    """Knows which request runs where. One event loop only."""

    def __init__(
        self,
        membership: Membership,
        channel: Sender,
        metrics: Metrics,
        *,
        requests_per_node: int,
        queue_limit: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        self._channel = channel
        self._requests_per_node = requests_per_node
        self._attempts: dict[str, Attempt] = {}
        self._stopped = False
        self.metrics = metrics
        self.clock = clock
        self.queue = RequestQueue(self.capacity, queue_limit, self._why_none)

    # -- what nodes say --

    def on_message(self, instance: str, message: FromNode) -> None:
        attempt = self._attempts.get(message.request)
        if attempt is not None and attempt.decode.instance == instance:
            attempt.take(message)
            return
        self.metrics.dropped("unknown_request")
        if isinstance(message, TokenDelta):
            self._tell_to_stop(instance, message.request)

    def on_lost(self, instance: str) -> None:
        """The node is gone: its requests fail here, and it is told to stop them in case it lives."""
        self._end([one for one in self._attempts.values() if one.decode.instance == instance], LOST)
        self.queue.move_up()

    def on_refused(self, instance: str) -> None:
        """The node could not take something of ours, and cannot say what: whatever it has said nothing of may be that,
        and would wait for ever."""
        ours = [one for one in self._attempts.values() if one.decode.instance == instance]
        self._end([one for one in ours if not one.received], REFUSED)

    # -- the router's own end --

    def stop(self) -> None:
        """From now on nothing is sent; what runs or waits is told that the router stops."""
        self._stopped = True
        self.queue.dismiss(STOPPING)
        self._end(list(self._attempts.values()), STOPPING)

    # -- what a Run does --

    def start(self, request: TokenRequest, tried: Tried) -> Attempt:
        """Send the request to the best node that takes the message. Raises RequestFailed."""
        able, prefills = self._able(), self._membership.of_role(Role.PREFILL)
        for decode in rank_decodes(able, len(request.prompt), self._requests_per_node, tried.decodes):
            ranking = rank_prefills(prefills, decode, tried.prefills)
            if self._channel.send(decode.instance, self._message(request, ranking, tried.attempts)):
                tried.prefills.update(prefill.instance for prefill in ranking)
                return self._open(request, decode, ranking)
            self.metrics.unsent.inc()
        raise RequestFailed(self._why_none())

    def has_room(self, tried: Tried) -> bool:
        """Whether a decode node that has not failed it would take one more now. Raises RequestFailed if none such is
        left."""
        able = [decode for decode in self._able() if decode.instance not in tried.decodes]
        if not able:
            raise RequestFailed(self._why_none())
        return any(decode.in_flight < self._requests_per_node for decode in able)

    def has_other_prefills(self, tried: Tried) -> bool:
        """Whether some decode node could be offered one that was not."""
        prefills = self._membership.of_role(Role.PREFILL)
        rankings = (rank_prefills(prefills, decode, tried.prefills) for decode in self._able())
        return any(ranking and ranking[0].instance not in tried.prefills for ranking in rankings)

    def finish(self, attempt: Attempt) -> None:
        """The router is done with it; whatever the node still sends is unknown from now on."""
        if self._attempts.pop(attempt.request, None) is None:
            return
        if not attempt.over:
            self.abort(attempt.decode.instance, attempt.request)
        attempt.decode.in_flight -= 1
        self.prompt_done(attempt)

    def prompt_done(self, attempt: Attempt) -> None:
        """The first token came: no prefill node is busy with this prompt any more."""
        if attempt.first_prefill is not None:
            attempt.first_prefill.in_flight -= 1
            attempt.first_prefill = None

    def stop_choice(self, attempt: Attempt, choice: int) -> None:
        """Enough tokens of this one. The others go on."""
        if not attempt.over and choice in attempt.tokens:
            attempt.stopped.add(choice)
            self.abort(attempt.decode.instance, attempt.request, choice)

    def abort(self, instance: str, request: str, choice: int | None = None) -> None:
        """`choice` None: all of them."""
        self.metrics.aborts.inc()
        self._tell_to_stop(instance, request, choice)

    def _tell_to_stop(self, instance: str, request: str, choice: int | None = None) -> None:
        """Or once more, where tokens crossed the first word."""
        if not self._channel.send(instance, Abort(request=request, choice=choice)):
            self.metrics.unsent.inc()

    def _end(self, attempts: Iterable[Attempt], failure: Failure) -> None:
        for attempt in attempts:
            if not attempt.over:
                attempt.fail(failure)
                self.abort(attempt.decode.instance, attempt.request)

    def _open(self, request: TokenRequest, decode: Member, ranking: list[Member]) -> Attempt:
        first = None if decode.status.local_prefill or not ranking else ranking[0]
        attempt = Attempt(request.key, decode, first, dict.fromkeys(range(request.n), 0))
        self._attempts[request.key] = attempt
        decode.in_flight += 1
        if first is not None:
            first.in_flight += 1
        event(
            log,
            "request sent",
            request=request.key,
            public_id=request.public_id,
            decode=decode.status.name,
            prefill=first.status.name if first else None,
        )
        return attempt

    def _message(self, request: TokenRequest, ranking: list[Member], attempts: int) -> DecodeRequest:
        return DecodeRequest(
            request=request.key,
            public_id=request.public_id,
            prompt=request.prompt,
            sampling=request.sampling,
            deadline_s=max(0.0, request.deadline - self.clock()),
            prefills=[address(prefill) for prefill in ranking],
            n=request.n,
            attempts=attempts,
        )

    def capacity(self) -> int:
        """Requests that the nodes may have at once; 0 where none can serve, or once stopped."""
        return len(self._able()) * self._requests_per_node

    def _why_none(self) -> Failure:
        """Why nothing can be sent. Where all nodes are there but do not go together, time mends nothing."""
        if self._stopped:
            return STOPPING
        prefills = self._membership.of_role(Role.PREFILL)
        ready = [member for member in self._membership.of_role(Role.DECODE) if member.usable]
        reasons = [(member.status.name, why_unfed(member, prefills)) for member in ready]
        if not reasons or any(reason is None for _, reason in reasons):
            return NOBODY
        name, reason = reasons[0]
        text = f"No decode node can be used: {name} {reason}. This does not pass by itself; see /v1/cluster."
        return Failure(FailureCode.NO_DECODE, text[:1000])

    def _able(self) -> list[Member]:
        if self._stopped:
            return []
        return able_decodes(self._membership.of_role(Role.DECODE), self._membership.of_role(Role.PREFILL))
