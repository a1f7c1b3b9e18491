"""Records over one end of a socketpair: a length of four bytes, then MessagePack. File descriptors may come along."""

import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, Generic, Self, TypeVar

import msgspec

MAX_RECORD_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
_MAX_FDS = 4

T = TypeVar("T")


class PeerGone(EOFError):
    """Nobody holds the other end any more."""


class Channel(Generic[T]):
    """`received`: a union of tagged records, of which nothing else is taken. One thread may send while another one
    receives. Raises PeerGone once the other side is gone, TimeoutError where it neither takes nor gives anything within
    the socket's time-out, and ValueError for what is no such record."""

    def __init__(self, end: socket.socket, received: Any) -> None:
        self._end = end
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(received)
        self._encoder = msgspec.msgpack.Encoder()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, record: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        self.send_encoded(self.encode(record), fds)

    def encode(self, record: msgspec.Struct) -> bytes:
        """A record as it travels, for several channels."""
        body = self._encoder.encode(record)
        if len(body) > MAX_RECORD_BYTES:
            raise ValueError(f"{type(record).__name__} takes {len(body)} bytes, limit {MAX_RECORD_BYTES}")
        return _LENGTH.pack(len(body)) + body

    def send_encoded(self, record: bytes, fds: Sequence[int] = ()) -> None:
        try:
            if fds:
                sent = socket.send_fds(self._end, [record[: _LENGTH.size]], fds)
                assert sent == _LENGTH.size, "an empty socket takes four bytes"
                record = record[_LENGTH.size :]
            self._end.sendall(record)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerGone("the other side is gone") from error

    def receive(self) -> T:
        record, fds = self.receive_with_fds()
        for fd in fds:
            os.close(fd)
        return record

    def receive_with_fds(self) -> tuple[T, list[int]]:
        """The descriptors are the caller's to close."""
        try:
            header, fds, _, _ = socket.recv_fds(self._end, _LENGTH.size, _MAX_FDS, socket.MSG_WAITALL)
            (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size - len(header), header))
            if size > MAX_RECORD_BYTES:
                raise ValueError(f"a record of {size} bytes, limit {MAX_RECORD_BYTES}")
            return self._decoder.decode(self._exactly(size)), fds
        except ConnectionResetError as error:
            raise PeerGone("the other side is gone") from error

    def close(self) -> None:
        self._end.close()

    def _exactly(self, count: int, before: bytes = b"") -> bytes:
        parts = [before]
        while count:
            part = self._end.recv(min(count, 1 << 20))
            if not part:
                raise PeerGone("the other side is gone")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)
