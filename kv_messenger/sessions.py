"""The prefill side's view of decode nodes: one session per instance, each with its own sending endpoint."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fabric.api import Sending, TransferEngine
from kv_messenger.peers import PEER_TIMEOUT_S
from kv_messenger.sharding import refuse_pair
from protocol.layout import KVLayout
from protocol.messages import Failure, FailureCode, Hello

AVOID_S = 60.0
"""How long new sessions with an instance do without a rail that failed: it may be mended, or was blamed for a fence."""


@dataclass(slots=True)
class Session:
    """`landing` numbers the decode side's landing endpoint that `endpoint` writes to, `layout` is of its pools.
    `doubts`: by rail in doubt, when the answer must be here."""

    instance: str
    name: str
    landing: int
    layout: KVLayout
    endpoint: Sending
    last_seen: float
    doubts: dict[int, float] = field(default_factory=dict)


def hello_refusal(hello: Hello, instance: str, compatibility: str, layout: KVLayout) -> Failure | None:
    """Why it opens no session with us, the `instance` with these sources, or None if it does."""
    if hello.expects != instance:
        return Failure(FailureCode.STALE_PEER, f"this is instance {instance}, not {hello.expects}")
    reason = refuse_pair(layout, hello.layout)
    if reason is None and hello.compatibility != compatibility:
        reason = "model, tokenizer or protocol version differ"
    return Failure(FailureCode.INCOMPATIBLE, reason) if reason else None


class Sessions:
    """Used on the pump's thread alone."""

    def __init__(self, fabric: TransferEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._fabric = fabric
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._avoided: dict[str, dict[int, float]] = {}
        """By instance, rails and until when."""

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, instance: str) -> Session | None:
        return self._sessions.get(instance)

    def all(self) -> list[Session]:
        return list(self._sessions.values())

    def open(self, hello: Hello) -> Session:
        """The caller has closed an older session of the instance before."""
        assert hello.instance not in self._sessions, hello.instance
        self.expire(self._clock())
        without = self._avoided.get(hello.instance, {})
        endpoint = self._fabric.connect(hello.name, hello.landing_address, without, asks_peer=True)
        session = Session(hello.instance, hello.name, hello.landing, hello.layout, endpoint, self._clock())
        self._sessions[hello.instance] = session
        return session

    def close(self, session: Session) -> None:
        """Its batches end with the fabric's next events."""
        del self._sessions[session.instance]
        self._fabric.close_endpoint(session.endpoint)

    def avoid(self, session: Session, rail: int) -> None:
        """It failed with writes on their way: for AVOID_S, new sessions with this instance do without it. Once all have
        failed, all are tried again."""
        avoided = self._avoided.setdefault(session.instance, {})
        avoided[rail] = self._clock() + AVOID_S
        if len(avoided) == self._fabric.rails:
            del self._avoided[session.instance]

    @property
    def avoids(self) -> int:
        """Instances towards which some rail is."""
        return len(self._avoided)

    def expire(self, now: float) -> None:
        """Rails that were avoided for long enough, also of instances that are gone."""
        kept = {
            instance: {rail: until for rail, until in rails.items() if now < until}
            for instance, rails in self._avoided.items()
        }
        self._avoided = {instance: rails for instance, rails in kept.items() if rails}

    def forgive(self, session: Session) -> None:
        """The instance is given up: nothing of it is remembered."""
        self._avoided.pop(session.instance, None)

    def seen(self, instance: str) -> None:
        session = self._sessions.get(instance)
        if session is not None:
            session.last_seen = self._clock()

    def silent(self, now: float) -> list[Session]:
        return [session for session in self._sessions.values() if now - session.last_seen > PEER_TIMEOUT_S]

    def of_endpoint(self, endpoint: int) -> Session | None:
        return next((session for session in self._sessions.values() if session.endpoint.id == endpoint), None)
