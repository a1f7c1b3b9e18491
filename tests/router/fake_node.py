"""A node without a model: speaks the real protocol over a real CURVE socket and does as its script says."""

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from protocol import PROTOCOL_VERSION
from protocol.codec import decode, encode
from protocol.context import NO_CONTEXT
from protocol.curve import ClusterKey
from protocol.ledger import Ledger
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
    ToNode,
)

DEADLINE_S = 10.0
HEARTBEAT_S = 0.25

Script = Callable[["FakeNode", DecodeRequest], None]
"""Called on the node's own thread for each DecodeRequest."""


def answer(tokens: Iterable[int], end: int | None = None) -> Script:
    """Send `tokens` one by one, then `end` if it fits; stop at the request's limit."""
    output = [*tokens, *([] if end is None else [end])]

    def script(node: "FakeNode", request: DecodeRequest) -> None:
        limited = output[: request.sampling.max_new_tokens]
        for index, token in enumerate(limited):
            node.say(TokenDelta(request=request.request, index=index, tokens=[token]))
        stopped = end is not None and limited[-1] == end
        node.end(request, FinishReason.STOP if stopped else FinishReason.LENGTH)

    return script


def say_choices(node: "FakeNode", request: DecodeRequest, outputs: Sequence[Sequence[int]]) -> None:
    """A token of each choice in turn, and nothing more."""
    for index in range(max(map(len, outputs))):
        for choice, tokens in enumerate(outputs):
            if index < len(tokens):
                node.say(TokenDelta(request=request.request, index=index, tokens=[tokens[index]], choice=choice))


def answer_choices(outputs: Sequence[Sequence[int]], ends: Sequence[FinishReason]) -> Script:
    """All tokens of all choices in turn; each choice ends for its reason, in their order."""

    def script(node: "FakeNode", request: DecodeRequest) -> None:
        say_choices(node, request, outputs)
        for choice, reason in enumerate(ends[:-1]):
            node.say(ChoiceEnded(request=request.request, choice=choice, reason=reason))
        node.end(request, ends[-1])

    return script


def tokens_then_nothing(tokens: Iterable[int]) -> Script:
    def script(node: "FakeNode", request: DecodeRequest) -> None:
        for index, token in enumerate(tokens):
            node.say(TokenDelta(request=request.request, index=index, tokens=[token]))

    return script


def refuse(code: FailureCode, message: str = "refused by the script") -> Script:
    def script(node: "FakeNode", request: DecodeRequest) -> None:
        node.end(request, FinishReason.ERROR, Failure(code, message))

    return script


def stall(node: "FakeNode", request: DecodeRequest) -> None:
    """Accept, and say nothing."""


def node_status(instance: str, **changes: Any) -> NodeStatus:
    """A ready decode node that serves alone, unless told otherwise."""
    plain = NodeStatus(
        protocol_version=PROTOCOL_VERSION,
        role=Role.DECODE,
        instance=instance,
        name=instance,
        control_address="",
        status_address=f"http://status/{instance}",
        compatibility="same",
        dtype="float32",
        context=NO_CONTEXT,
        tokenizer="",
        model="tiny",
        provider="net",
        ready=True,
        draining=False,
        local_prefill=True,
        page_size=16,
        pages_total=64,
        pages_free=64,
        pages_quarantined=0,
        running=0,
        waiting=0,
        max_context=512,
    )
    return msgspec.structs.replace(plain, **changes)


class FakeNode:
    """Dials `router` in `start`. `script` may be replaced while it runs. `close` is silent, as a kill is."""

    def __init__(self, router: str, key: ClusterKey, status: NodeStatus, script: Script = stall) -> None:
        self.status = status
        self.script = script
        self.seen: list[Any] = []
        self.acks: list[StatusAck] = []
        self._router = router
        self._key = key
        self._change = threading.Condition()
        self._outbox: deque[bytes] = deque()
        self._said: Counter[str] = Counter()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"fake-{status.name}", daemon=True)

    @property
    def instance(self) -> str:
        return self.status.instance

    def start(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(DEADLINE_S)
        os.close(self._wake)

    def say(self, message: msgspec.Struct) -> None:
        deltas = message.deltas if isinstance(message, TokenDeltas) else [message]
        for delta in deltas:
            if isinstance(delta, TokenDelta):
                self._said[delta.request] += len(delta.tokens)
        self.say_bytes(encode(message))

    def say_bytes(self, frame: bytes) -> None:
        self._outbox.append(frame)
        os.eventfd_write(self._wake, 1)

    def announce(self, **changes: Any) -> None:
        """A heartbeat at once, with the status changed for good."""
        self.status = msgspec.structs.replace(self.status, **changes)
        self.say(self.status)

    def end(self, request: DecodeRequest, reason: FinishReason, failure: Failure | None = None) -> None:
        ledger = Ledger(decode_node=self.status.name, provider="net", queue_s=0.001, writes=7)
        said = self._said[request.request]
        self.say(RequestEnded(request=request.request, reason=reason, tokens=said, failure=failure, ledger=ledger))

    def wait_for(self, found: Callable[[Self], bool]) -> bool:
        """Whether `found` became true of what this node has seen, within the deadline."""
        with self._change:
            return self._change.wait_for(lambda: found(self), DEADLINE_S)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.seen if isinstance(message, kind)]

    @property
    def requests(self) -> list[DecodeRequest]:
        return self.of(DecodeRequest)

    def was_aborted(self, request: str) -> bool:
        return self.wait_for(lambda node: any(abort.request == request for abort in node.of(Abort)))

    def was_asked(self, times: int = 1) -> bool:
        return self.wait_for(lambda node: len(node.requests) >= times)

    def was_acknowledged(self) -> bool:
        return self.wait_for(lambda node: bool(node.acks))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.routing_id = self.instance.encode()
            self._key.secure_client(socket)
            socket.connect(self._router)
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(self._wake, zmq.POLLIN)
            self._serve(socket, poller)

    def _serve(self, socket: "zmq.Socket[bytes]", poller: zmq.Poller) -> None:
        beat_at = 0.0
        while not self._stopping:
            if time.monotonic() >= beat_at:
                socket.send(encode(self.status))
                beat_at = time.monotonic() + HEARTBEAT_S
            ready = dict(poller.poll(int(HEARTBEAT_S * 1000)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if socket in ready:
                self._take(decode(socket.recv(), ToNode))
            while self._outbox:
                socket.send(self._outbox.popleft())

    def _take(self, message: Any) -> None:
        with self._change:
            (self.acks if isinstance(message, StatusAck) else self.seen).append(message)
            self._change.notify_all()
        if isinstance(message, DecodeRequest):
            self.script(self, message)
