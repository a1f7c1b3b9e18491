"""The control thread of a node: ZeroMQ sockets, their handlers, a clock tick, and sends from other threads.

Every send is non-blocking and every queue bounded: a peer that does not read loses messages (which its deadlines and
heartbeats turn into failures), it never blocks us. Handlers run on the control thread and must not block.
"""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import zmq

from protocol.codec import MAX_FRAME_BYTES, BadFrame, decode, encode
from protocol.curve import ClusterKey, Gatekeeper
from protocol.logs import event
from protocol.messages import Failure, FailureCode, Nack

HIGH_WATER_MARK = 1000
MAX_POSTED = 10_000
MAX_FRAMES_PER_TURN = 100
TICK_S = 1.0
_BROKEN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED

log = logging.getLogger(__name__)

Handler = Callable[["Link", bytes, Any], None]
"""(link, identity of the sender or b"", decoded message)"""


class ControlOverloaded(RuntimeError):
    """The control thread does not keep up: our bug, the node is unhealthy."""


@dataclass(eq=False)
class Link:
    """One socket and what may arrive on it. `bound`: many peers behind identities, else one peer. `monitor`: tells of
    its connection, where somebody wants to know."""

    socket: "zmq.Socket[bytes]"
    expected: Any
    handler: Handler
    bound: bool
    monitor: "zmq.Socket[bytes] | None" = None


@dataclass
class ChannelCounters:
    received: int = 0
    bad_frames: int = 0
    unsent: int = 0


class ControlThread:
    """Owns the node's control sockets. `post` and `send` may come from any thread; the rest runs on this one."""

    def __init__(
        self, key: ClusterKey, identity: str, on_tick: Callable[[], None], high_water_mark: int = HIGH_WATER_MARK
    ) -> None:
        self._key = key
        self._identity = identity.encode()
        self._on_tick = on_tick
        self._high_water_mark = high_water_mark
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gatekeeper = Gatekeeper(self._context, key)
        self._poller = zmq.Poller()
        self._links: dict[Any, Link] = {}
        self._watched: dict[Any, Callable[[], None]] = {}
        """By the monitor of a dialled socket, who wants to know that its connection is broken."""
        self._posted: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._stopping = False
        self._closing = threading.Lock()
        self._closed = False
        self.counters = ChannelCounters()

    # -- before start, or on the control thread --

    def bind(self, address: str, expected: Any, handler: Handler) -> tuple[Link, str]:
        """A socket that peers dial. Returns the link and the address it got. Raises zmq.ZMQError."""
        self._gatekeeper.start()
        socket = self._socket(zmq.ROUTER)
        socket.router_mandatory = True
        socket.router_handover = True
        self._key.secure_server(socket)
        socket.bind(address)
        return self._add(Link(socket, expected, handler, bound=True)), cast(bytes, socket.last_endpoint).decode()

    def dial(self, address: str, expected: Any, handler: Handler, broken: Callable[[], None] | None = None) -> Link:
        """A socket to one peer; reconnects by itself, and drops what was queued for a peer that is away. `broken` is
        called whenever the connection ends, and whenever none can be made. Raises zmq.ZMQError for what is no
        address."""
        socket = self._socket(zmq.DEALER)
        socket.routing_id = self._identity
        socket.reconnect_ivl = 100
        socket.reconnect_ivl_max = 1000
        self._key.secure_client(socket)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close()
            raise
        link = Link(socket, expected, handler, bound=False)
        if broken is not None:
            link.monitor = socket.get_monitor_socket(_BROKEN)
            self._watched[link.monitor] = broken
            self._poller.register(link.monitor, zmq.POLLIN)
        return self._add(link)

    def hang_up(self, link: Link) -> None:
        if self._links.pop(link.socket, None) is not None:
            self._close(link, 0)

    def send_now(self, link: Link, message: msgspec.Struct, to: bytes = b"") -> bool:
        """On the control thread. False if the peer's queue is full or the peer is unknown: counted, not raised."""
        try:
            frame = self._frame(message)
            frames = [to, frame] if link.bound else [frame]
            link.socket.send_multipart(frames, zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError, BadFrame) as error:
            if isinstance(error, zmq.ZMQError) and error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.counters.unsent += 1
            event(log, "not sent", logging.WARNING, kind=type(message).__name__, reason=str(error))
            return False
        return True

    # -- from any thread --

    def start(self) -> None:
        self._thread.start()

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` on the control thread, in order; dropped once closed. Raises ControlOverloaded if it hangs."""
        if len(self._posted) >= MAX_POSTED:
            raise ControlOverloaded(f"the control thread has {MAX_POSTED} actions waiting")
        with self._closing:
            if not self._closed:
                self._posted.append(action)
                os.eventfd_write(self._wake, 1)

    def send(self, link: Link, message: msgspec.Struct, to: bytes = b"") -> None:
        def action() -> None:
            self.send_now(link, message, to)

        self.post(action)

    def close(self) -> None:
        """Runs what was posted, then closes every socket."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join()
        for link in list(self._links.values()):
            self._close(link, 200)
        self._links.clear()
        self._gatekeeper.close()
        self._context.term()
        with self._closing:
            self._closed = True
            os.close(self._wake)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # -- the thread --

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = self._high_water_mark
        socket.rcvhwm = self._high_water_mark
        socket.maxmsgsize = MAX_FRAME_BYTES
        return socket

    def _add(self, link: Link) -> Link:
        self._links[link.socket] = link
        self._poller.register(link.socket, zmq.POLLIN)
        return link

    def _close(self, link: Link, linger_ms: int) -> None:
        self._poller.unregister(link.socket)
        if link.monitor is not None:
            self._poller.unregister(link.monitor)
            del self._watched[link.monitor]
            link.socket.disable_monitor()
            link.monitor.close(0)
        link.socket.close(linger_ms)

    def _frame(self, message: msgspec.Struct) -> bytes:
        return encode(message)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception("control thread died")
            raise

    def _serve(self) -> None:
        self._poller.register(self._wake, zmq.POLLIN)
        next_tick = time.monotonic() + TICK_S
        while not self._stopping:
            ready = self._poller.poll(max(0, math.ceil((next_tick - time.monotonic()) * 1000)))
            for socket, _ in ready:
                if socket == self._wake:
                    os.eventfd_read(self._wake)
                elif socket in self._links:
                    self._receive(self._links[socket])
                elif socket in self._watched:
                    self._note_breaks(socket)
            self._run_posted()
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_S  # ticks missed in a pause are not made up for
                self._on_tick()
        self._run_posted()
        self._poller.unregister(self._wake)

    def _run_posted(self) -> None:
        for _ in range(len(self._posted)):
            self._posted.popleft()()

    def _receive(self, link: Link) -> None:
        for _ in range(MAX_FRAMES_PER_TURN):
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            sender = frames[0] if link.bound else b""
            self._dispatch(link, sender, frames[-1])
            if link.socket not in self._links:
                return

    def _note_breaks(self, monitor: "zmq.Socket[bytes]") -> None:
        """Several at once are one."""
        with suppress(zmq.Again):
            while True:
                monitor.recv_multipart(zmq.NOBLOCK)
        self._watched[monitor]()

    def _dispatch(self, link: Link, sender: bytes, frame: bytes) -> None:
        self.counters.received += 1
        try:
            message = decode(frame, link.expected)
        except BadFrame as error:
            self.counters.bad_frames += 1
            event(log, "bad frame", logging.WARNING, sender=sender.decode(errors="replace"), error=str(error))
            self.send_now(link, Nack(failure=Failure(FailureCode.UNSUPPORTED, str(error)[:1000])), sender)
            return
        link.handler(link, sender, message)
