"""Clients and the router between them and the nodes: the real membership and policy, and the rules of `router.run`
without its coroutines."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protocol.channel import Link
from protocol.messages import (
    Abort,
    ChoiceEnded,
    DecodeRequest,
    Failure,
    FailureCode,
    FinishReason,
    NodeStatus,
    RequestEnded,
    Role,
    StatusAck,
    TokenDelta,
    TokenDeltas,
)
from protocol.sampling import SamplingParams
from router.membership import Member, Membership
from router.policy import able_decodes, address, rank_decodes, rank_prefills
from router.run import MAX_ATTEMPTS, RETRYABLE
from tests.simulation.channel import SimulatedControl
from tests.simulation.errors import Violation
from tests.simulation.nodes import ROUTER, Surroundings
from tests.simulation.schedule import Process
from tests.simulation.script import Submission

SWEEP_S = 0.25
REQUESTS_PER_NODE = 8
LOST = Failure(FailureCode.NODE_LOST, "the node is gone")
LATE = Failure(FailureCode.DEADLINE, "the deadline passed")
ROUTER_LOST = Failure(FailureCode.INTERNAL, "the router is gone")
LEFT = "the client left"


@dataclass
class ClientRequest:
    """`outcome`: how it ended, once: its reason, its failure, or that the client left. `decode`: where it runs.
    `tokens`, `over`: of its choices, how many came of each there, and which have ended or were stopped."""

    key: str
    submission: Submission
    deadline: float
    outcome: FinishReason | Failure | str | None = None
    decode: Member | None = None
    tokens: Counter[int] = field(default_factory=Counter)
    over: set[int] = field(default_factory=set)
    shown: bool = False
    tried: set[str] = field(default_factory=set)

    def end(self, outcome: FinishReason | Failure | str) -> None:
        if self.outcome is not None:
            raise Violation(f"{self.key} has two outcomes: {self.outcome} and {outcome}")
        self.outcome, self.decode = outcome, None


class SimulatedRouter:
    """`requests` outlive it: their clients see when it is gone."""

    def __init__(self, around: Surroundings, incarnation: int, requests: dict[str, ClientRequest]) -> None:
        self.process = Process(f"router.{incarnation}")
        self._around = around
        self._requests = requests
        self._membership = Membership("tokenizer", around.schedule.now)
        self._control = SimulatedControl(
            around.channel, self.process, self.process.name, around.script.manners.thread_lag
        )
        self._link, _ = self._control.bind(ROUTER, None, self._receive)

    @property
    def control(self) -> SimulatedControl:
        return self._control

    def start(self) -> None:
        self._around.schedule.after(SWEEP_S, self._sweep, self.process)

    # ---- clients ----

    def submit(self, request: ClientRequest) -> None:
        self._requests[request.key] = request
        self._start(request)

    def leave(self, request: ClientRequest) -> None:
        if request.outcome is None:
            self._abort(request)
            request.end(LEFT)

    def lost(self) -> None:
        """It dies: every client of its sees a broken connection."""
        for request in self._open():
            request.end(ROUTER_LOST)

    # ---- nodes ----

    def _receive(self, link: Link, sender: bytes, message: Any) -> None:
        match message:
            case NodeStatus():
                refusal, lost = self._membership.observe(message, self._around.schedule.now)
                self._each([member.instance for member in lost], self._on_lost)
                self._send(message.instance, StatusAck(router_instance=self.process.name, refusal=refusal))
                self._start_waiting()
            case TokenDeltas():
                for delta in message.deltas:
                    self._receive(link, sender, delta)
            case TokenDelta() | ChoiceEnded() | RequestEnded():
                request = self._requests.get(message.request)
                if request is not None and request.decode is not None and request.decode.instance == sender.decode():
                    self._said(request, message)
                elif isinstance(message, TokenDelta):
                    self._send(sender.decode(), Abort(request=message.request))

    def _said(self, request: ClientRequest, message: TokenDelta | ChoiceEnded | RequestEnded) -> None:
        match message:
            case RequestEnded():
                self._ended(request, message)
            case ChoiceEnded():
                self._over(request, message.choice)
            case _ if message.index != request.tokens[message.choice]:  # one was lost on the way
                self._abort(request)
                self._failed(request, Failure(FailureCode.INTERNAL, "a token is missing"))
            case _:
                request.tokens[message.choice] += len(message.tokens)
                request.shown = True
                if message.choice == request.submission.stops and message.choice not in request.over:
                    self._abort(request, message.choice)
                    self._over(request, message.choice)

    def _over(self, request: ClientRequest, choice: int) -> None:
        """The last one to be over is the end of the request, whatever the node still says."""
        request.over.add(choice)
        if len(request.over) == request.submission.n:
            self._abort(request)
            request.end(FinishReason.LENGTH)

    def _ended(self, request: ClientRequest, message: RequestEnded) -> None:
        submission = request.submission
        if message.reason in (FinishReason.STOP, FinishReason.LENGTH):
            if request.tokens.total() != message.tokens or len(request.over) != submission.n - 1:
                self._failed(request, Failure(FailureCode.INTERNAL, "tokens or ends are missing"))
                return
            whole = [request.tokens[choice] for choice in range(submission.n) if choice != submission.stops]
            if set(whole) != {submission.new_tokens}:
                raise Violation(f"{request.key} got {whole} tokens of {submission.new_tokens}")
            request.end(message.reason)
        elif message.reason is FinishReason.CANCELLED:
            self._failed(request, LOST)
        else:
            assert message.failure is not None
            self._failed(request, message.failure)

    def _on_lost(self, instance: str) -> None:
        for request in self._open():
            if request.decode is not None and request.decode.instance == instance:
                self._abort(request)
                self._failed(request, LOST)

    def _sweep(self) -> None:
        now = self._around.schedule.now
        self._each([member.instance for member in self._membership.sweep(now)], self._on_lost)
        for request in self._open():
            if now >= request.deadline:
                self._abort(request)
                request.end(LATE)
        self._start_waiting()
        self._around.schedule.after(SWEEP_S, self._sweep, self.process)

    # ---- inside ----

    def _start_waiting(self) -> None:
        for request in self._open():
            if request.decode is None:
                self._start(request)

    def _start(self, request: ClientRequest) -> bool:
        """False if no node can take it now."""
        prefills = self._membership.of_role(Role.PREFILL)
        able = able_decodes(self._membership.of_role(Role.DECODE), prefills)
        for decode in rank_decodes(able, request.submission.tokens, REQUESTS_PER_NODE, request.tried):
            ranking = rank_prefills(prefills, decode)
            self._around.schedule.random.shuffle(ranking)
            if self._send(decode.instance, self._message(request, ranking)):
                request.decode = decode
                request.tokens.clear()
                request.over.clear()
                request.tried.add(decode.instance)
                return True
        return False

    def _message(self, request: ClientRequest, ranking: list[Member]) -> DecodeRequest:
        return DecodeRequest(
            request=request.key,
            public_id=request.key,
            prompt=[request.submission.family] * request.submission.tokens,
            sampling=SamplingParams(max_new_tokens=request.submission.new_tokens),
            deadline_s=max(0.0, request.deadline - self._around.schedule.now),
            prefills=[address(prefill) for prefill in ranking],
            n=request.submission.n,
        )

    def _failed(self, request: ClientRequest, failure: Failure) -> None:
        """Elsewhere, once, while nothing was shown."""
        request.decode = None
        again = not request.shown and failure.code in RETRYABLE and len(request.tried) < MAX_ATTEMPTS
        if not (again and self._start(request)):
            request.end(failure)

    def _abort(self, request: ClientRequest, choice: int | None = None) -> None:
        if request.decode is not None:
            self._send(request.decode.instance, Abort(request=request.key, choice=choice))

    def _send(self, instance: str, message: Any) -> bool:
        return self._control.send_now(self._link, message, instance.encode())

    def _open(self) -> list[ClientRequest]:
        return [request for request in self._requests.values() if request.outcome is None]

    @staticmethod
    def _each(instances: list[str], call: Callable[[str], None]) -> None:
        for instance in instances:
            call(instance)
