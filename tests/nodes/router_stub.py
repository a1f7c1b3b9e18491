"""The router's end of the control plane, for tests of nodes: real sockets, no HTTP."""

import queue
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from protocol.channel import ControlThread, Link
from protocol.curve import ClusterKey
from protocol.messages import (
    Abort,
    ChoiceEnded,
    DecodeRequest,
    FinishReason,
    FromNode,
    Message,
    NodeStatus,
    PrefillAddress,
    RequestEnded,
    Role,
    StatusAck,
    TokenDelta,
    TokenDeltas,
)
from protocol.sampling import SamplingParams

DEADLINE_S = 60.0


@dataclass
class Answer:
    """What one request has received so far. `outputs`, `reasons`: of its choices, the latter but for the last one."""

    outputs: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    ended: list[RequestEnded] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def tokens(self) -> list[int]:
        """Of the first choice."""
        return self.outputs[0]

    def result(self, timeout: float = DEADLINE_S) -> RequestEnded:
        with self.changed:
            assert self.changed.wait_for(lambda: bool(self.ended), timeout), f"no end, tokens so far {self.tokens}"
        return self.ended[0]

    def wait_tokens(self, count: int, timeout: float = DEADLINE_S) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.tokens) >= count, timeout), self.tokens


class RouterStub:
    """Registers nodes, sends requests to decode nodes, and keeps every answer."""

    def __init__(self, key: ClusterKey) -> None:
        self.control = ControlThread(key, "router", lambda: None)
        self.link, self.address = self.control.bind("tcp://127.0.0.1:*", FromNode, self._receive)
        self.instance = "router-1"
        self.nodes: dict[str, NodeStatus] = {}
        self.answers: dict[str, Answer] = {}
        self.strays: queue.Queue[Message] = queue.Queue()
        self._registered = threading.Condition()
        self._count = 0
        self.control.start()

    def close(self) -> None:
        self.control.close()

    def wait_for(self, what: Any, timeout: float = DEADLINE_S) -> None:
        """Until `what(nodes)` holds; checked at every NodeStatus."""
        with self._registered:
            assert self._registered.wait_for(lambda: what(self.nodes), timeout), self.nodes

    def instances(self, role: Role) -> list[str]:
        return [node.instance for node in self.nodes.values() if node.role is role]

    def instance_of(self, name: str) -> str:
        (instance,) = [node.instance for node in self.nodes.values() if node.name == name]
        return instance

    def prefills(self) -> list[PrefillAddress]:
        return [
            PrefillAddress(node.instance, node.name, node.control_address)
            for node in self.nodes.values()
            if node.role is Role.PREFILL
        ]

    def ask(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        decode: str | None = None,
        prefills: list[PrefillAddress] | None = None,
        deadline_s: float = DEADLINE_S,
        public_id: str = "",
        n: int = 1,
    ) -> tuple[str, Answer]:
        """Send one request; returns its key and the answer as it fills."""
        self._count += 1
        key = f"test-request-{self._count}"
        answer = self.answers[key] = Answer()
        request = DecodeRequest(
            request=key,
            public_id=public_id,
            prompt=prompt,
            sampling=sampling,
            deadline_s=deadline_s,
            prefills=self.prefills() if prefills is None else prefills,
            n=n,
        )
        self.control.send(self.link, request, (decode or self.instances(Role.DECODE)[0]).encode())
        return key, answer

    def abort(self, key: str, decode: str | None = None, choice: int | None = None) -> None:
        self.control.send(
            self.link, Abort(request=key, choice=choice), (decode or self.instances(Role.DECODE)[0]).encode()
        )

    def _receive(self, link: Link, sender: bytes, message: Any) -> None:
        match message:
            case NodeStatus():
                self.control.send_now(link, StatusAck(router_instance=self.instance, refusal=None), sender)
                with self._registered:
                    self.nodes[message.instance] = message
                    self._registered.notify_all()
            case TokenDeltas():
                for delta in message.deltas:
                    self._receive(link, sender, delta)
            case TokenDelta() | ChoiceEnded() | RequestEnded() if message.request in self.answers:
                self._answer(self.answers[message.request], message)
            case _:
                self.strays.put(message)

    def _answer(self, answer: Answer, message: TokenDelta | ChoiceEnded | RequestEnded) -> None:
        with answer.changed:
            if isinstance(message, RequestEnded):
                answer.ended.append(message)
            else:
                assert message.choice not in answer.reasons and not answer.ended, (message, answer)
                self._of_choice(answer, message)
            answer.changed.notify_all()

    @staticmethod
    def _of_choice(answer: Answer, message: TokenDelta | ChoiceEnded) -> None:
        if isinstance(message, ChoiceEnded):
            answer.reasons[message.choice] = message.reason
        else:
            output = answer.outputs[message.choice]
            assert message.index == len(output), (message, answer)
            output += message.tokens
