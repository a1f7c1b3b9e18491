"""The socket that nodes dial: one authenticated ZeroMQ ROUTER on the event loop.

A node is addressed by its instance id. Sends never wait: a node that does not read fills its own bounded queue, and
then `send` says False.
"""

import asyncio
from typing import cast

import msgspec
import zmq
import zmq.asyncio

from protocol.codec import MAX_FRAME_BYTES, encode
from protocol.curve import ClusterKey, Gatekeeper

HIGH_WATER_MARK = 1000
LINGER_MS = 200
"""Time for the last Aborts to leave when the router stops."""


class NodeChannel:
    """Open and use on one event loop. `high_water_mark`: most messages that wait for one node."""

    def __init__(self, key: ClusterKey, address: str, high_water_mark: int = HIGH_WATER_MARK) -> None:
        self._key = key
        self._bind_address = address
        self._high_water_mark = high_water_mark
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gatekeeper = Gatekeeper(self._context, key)
        self._socket: zmq.asyncio.Socket | None = None
        self.address = ""

    def open(self) -> None:
        """Binds; `address` then holds what nodes dial. Raises zmq.ZMQError if it is taken."""
        self._gatekeeper.start()
        socket = zmq.asyncio.Context.shadow(self._context).socket(zmq.ROUTER)
        socket.linger = LINGER_MS
        socket.sndhwm = self._high_water_mark
        socket.rcvhwm = self._high_water_mark
        socket.maxmsgsize = MAX_FRAME_BYTES
        socket.router_mandatory = True
        socket.router_handover = True
        self._key.secure_server(cast("zmq.Socket[bytes]", socket))
        self._socket = socket
        socket.bind(self._bind_address)
        self.address = cast(bytes, socket.last_endpoint).decode()

    async def receive(self) -> tuple[bytes, bytes]:
        """The next frame: identity of its sender, payload."""
        assert self._socket is not None
        frames = await self._socket.recv_multipart()
        return frames[0], frames[-1]

    def send(self, instance: str, message: msgspec.Struct) -> bool:
        """False if the node is not connected, or does not read. Raises BadFrame for a message too large to send."""
        assert self._socket is not None
        frames = [instance.encode(), encode(message)]
        sent = cast("asyncio.Future[object]", self._socket.send_multipart(frames, zmq.NOBLOCK))
        error = sent.exception()  # with NOBLOCK it is done already
        if error is None:
            return True
        if isinstance(error, zmq.Again) or (isinstance(error, zmq.ZMQError) and error.errno == zmq.EHOSTUNREACH):
            return False
        raise error

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._gatekeeper.close()
        self._context.term()
