"""The ways that `python -m bench transfer` compares, each with its processes: it moves so many pages, and says how long
that took. All have pools of the same size, and as many writes outstanding."""

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from bench.native import copy, receive
from bench.peers.environments import FOLDER, Environment, python_of
from bench.peers.orders import Child, ChildFailed
from bench.shared_pool import SharedPool
from fabric.api import Arrived
from fabric.immediates import ImmediateSlots
from fabric.libfabric import open_engine
from fabric.limits import Limits

POOL_BYTES = 64 << 20
ARRIVAL_S = 300.0


class Way(Protocol):
    def move(self, page: int, writes: int) -> float:
        """Seconds, from the order until all of it is there."""

    def close(self) -> None: ...


class FabricWay:
    """Paged writes of our own fabric; the clock runs here, until the last immediate was counted."""

    def __init__(self, provider: str, in_flight: int) -> None:
        self._sender = Child("bench.transfer_sender", [provider, str(POOL_BYTES), str(in_flight)])
        self._engine = open_engine(provider, limits=Limits(endpoint_writes=in_flight))
        pool = SharedPool(POOL_BYTES)
        self.pool = pool.data
        remote = pool.register(self._engine).remote
        self._slots = ImmediateSlots()
        self._landing = self._engine.open_landing("sender")
        address = self._landing.address.hex()
        self._sender.ask(do="connect", landing=address, keys=remote.keys, base=remote.base, length=remote.length)

    def move(self, page: int, writes: int) -> float:
        immediate = self._slots.take()
        assert immediate is not None
        expectation = self._engine.expect(self._landing, immediate, writes)
        began = time.monotonic()
        self._sender.tell(do="write", page=page, writes=writes, immediate=immediate)
        while not any(isinstance(event, Arrived) for event in self._engine.progress(1.0)):
            assert time.monotonic() - began < ARRIVAL_S, "the writes do not arrive"
        seconds = time.monotonic() - began
        self._engine.forget(expectation)
        self._slots.give_back(immediate)
        self._sender.answer()
        return seconds

    def close(self) -> None:
        self._sender.close()
        self._engine.close()


class StreamWay:
    """The limit of one TCP connection: both ends in C, page by page."""

    def __init__(self) -> None:
        self._pool = SharedPool(POOL_BYTES)
        self._sender = Child("bench.transfer_sender", ["", str(POOL_BYTES), "0"])
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._sender.tell(do="connect", port=server.getsockname()[1])
            self._connection, _ = server.accept()
        self._sender.answer()

    def move(self, page: int, writes: int) -> float:
        began = time.monotonic()
        self._sender.tell(do="write", page=page, writes=writes)
        receive(self._connection.fileno(), self._pool.data, page, writes)
        seconds = time.monotonic() - began
        self._sender.answer()
        return seconds

    def close(self) -> None:
        self._connection.close()
        self._sender.close()


class CopyWay:
    """The limit of the memory: one thread that copies."""

    def __init__(self) -> None:
        self._source, self._to = SharedPool(POOL_BYTES), SharedPool(POOL_BYTES)

    def move(self, page: int, writes: int) -> float:
        began = time.monotonic()
        copy(self._to.data, self._source.data, page, writes)
        return time.monotonic() - began

    def close(self) -> None: ...


class PeerWay:
    """Another transfer library, in an environment of its own: one process that is written to and one that writes. The
    clock runs in the latter, until the library says that all of it is done: it counts nothing at the target. Between
    its turns both are stopped."""

    def __init__(self, target: Child, initiator: Child) -> None:
        self._ends = target, initiator

    def connect(self) -> None:
        """Raises ChildFailed."""
        target, initiator = self._ends
        initiator.ask(do="connect", **target.ask(do="introduce"))
        self._pause()

    def move(self, page: int, writes: int) -> float:
        for end in self._ends:
            end.go_on()
        seconds = self._ends[1].ask(do="write", page=page, writes=writes)["seconds"]
        self._pause()
        return float(seconds)

    def close(self) -> None:
        for end in reversed(self._ends):
            end.close()

    def _pause(self) -> None:
        for end in self._ends:
            end.pause()


@dataclass(frozen=True, slots=True)
class PeerSetting:
    """What runs as either end, in which environment, with which variables."""

    module: str
    environment: Environment
    variables: Mapping[str, str]


def open_peer(name: str, setting: PeerSetting, in_flight: int) -> PeerWay:
    """Raises PeerMissing or ChildFailed."""
    python, arguments = python_of(setting.environment), [str(POOL_BYTES), str(in_flight)]
    target, initiator = (
        Child(setting.module, [role, *arguments], python, setting.variables, FOLDER / f"{name}.{role}.log")
        for role in ("target", "initiator")
    )
    peer = PeerWay(target, initiator)
    try:
        peer.connect()
    except ChildFailed:
        peer.close()
        raise
    return peer
