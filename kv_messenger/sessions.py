"""The prefill side's view of decode nodes: one session per instance, each with its own sending endpoint."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from fabric.api import Sending, TransferEngine
from kv_messenger.peers import PEER_TIMEOUT_S
from protocol.layout import KVLayout
from protocol.messages import Hello


@dataclass(slots=True)
class Session:
    """`landing` numbers the decode side's landing endpoint that `endpoint` writes to, `layout` is of its pools."""

    instance: str
    name: str
    landing: int
    layout: KVLayout
    endpoint: Sending
    last_seen: float


class Sessions:
    """Used on the pump's thread alone."""

    def __init__(self, fabric: TransferEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._fabric = fabric
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._avoided: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, instance: str) -> Session | None:
        return self._sessions.get(instance)

    def all(self) -> list[Session]:
        return list(self._sessions.values())

    def open(self, hello: Hello) -> Session:
        """The caller has closed an older session of the instance before."""
        assert hello.instance not in self._sessions, hello.instance
        without = self._avoided.get(hello.instance, set())
        endpoint = self._fabric.connect(hello.name, hello.landing_address, without)
        session = Session(hello.instance, hello.name, hello.landing, hello.layout, endpoint, self._clock())
        self._sessions[hello.instance] = session
        return session

    def close(self, session: Session) -> None:
        """Its batches end with the fabric's next events."""
        del self._sessions[session.instance]
        self._fabric.close_endpoint(session.endpoint)

    def avoid(self, session: Session, rail: int) -> None:
        """It failed with writes on their way: the next session with this instance does without it. Once all have
        failed, all are tried again."""
        avoided = self._avoided.setdefault(session.instance, set())
        avoided.add(rail)
        if len(avoided) == self._fabric.rails:
            del self._avoided[session.instance]

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
