"""Peers that speak the same-host path by hand, and say what an honest one never would (`fabric/core/same_host.h`)."""

import fcntl
import mmap
import os
import socket
import struct
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from fabric.landing_address import LandingAddress

PACKET = struct.Struct("=QQQQ")  # kind, number, offset, length
DESCRIPTOR = struct.Struct("=QQQQQI20x")  # source region and offset, target key and address, length, immediate
POSTED, CLOSED, DONE, REFUSED, DESCRIPTORS = 0, 16, 64, 72, 128
RING, REGION, WAKE = 1, 2, 3
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def sealed(size: int, seals: int = SEALS) -> int:
    """A memfd; the descriptor is the caller's."""
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _connect(address: bytes) -> socket.socket:
    known = LandingAddress.decode(address)
    assert known and known.same_host
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(b"\0" + known.same_host)
    return link


@dataclass
class RawSender:
    """Connected to a landing; it has offered nothing yet."""

    address: bytes
    _ring: mmap.mmap | None = None
    _link: socket.socket = field(init=False)

    def __post_init__(self) -> None:
        self._link = _connect(self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._link.close()
        if self._ring:
            self._ring.close()

    def offer(self, kind: int, file: int | None, number: int = 0, offset: int = 0, length: int = 0) -> None:
        """`file` is closed."""
        packet = PACKET.pack(kind, number, offset, length)
        if file is None:
            self._link.send(packet)
            return
        socket.send_fds(self._link, [packet], [file])
        os.close(file)

    def send(self, packet: bytes) -> None:
        self._link.send(packet)

    def offer_ring(self, slots: int = 4, size: int | None = None, seals: int = SEALS) -> None:
        file = sealed(DESCRIPTORS + slots * DESCRIPTOR.size if size is None else size, seals)
        self._ring = mmap.mmap(file, 0) if size is None else None
        self.offer(RING, file, length=slots)

    def offer_region(self, number: int, length: int) -> None:
        self.offer(REGION, sealed(length), number, 0, length)

    def post(self, at: int, descriptor: tuple[int, int, int, int, int, int]) -> None:
        """As the `at`th, from 0."""
        self.put(DESCRIPTORS + at * DESCRIPTOR.size, DESCRIPTOR.pack(*descriptor))
        self.say_posted(at + 1)

    def say_posted(self, count: int) -> None:
        self.put(POSTED, struct.pack("=Q", count))
        self.offer(WAKE, None)

    def put(self, at: int, data: bytes) -> None:
        assert self._ring
        self._ring[at : at + len(data)] = data

    def wait_closed(self) -> bool:
        """Until the other side closes it, or sends something."""
        return not self._link.recv(PACKET.size)

    def refusal(self) -> int:
        """The errno value that it was given, or 0."""
        assert self._ring
        code: int = struct.unpack_from("=I", self._ring, REFUSED)[0]
        return code


class RawReceiver:
    """Listens where a landing would, and takes a sender's ring."""

    def __init__(self) -> None:
        name = f"kvferry-test-{os.getpid()}-{id(self):x}".encode()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(b"\0" + name)
        self._listener.listen()
        self.address = LandingAddress(same_host=name).encode()

    def accept(self) -> None:
        self._link, _ = self._listener.accept()

    def take_offer(self) -> int:
        """The descriptor of a ring, first, or of a region; the caller's."""
        _, files, _, _ = socket.recv_fds(self._link, PACKET.size, 1)
        return files[0]

    def acknowledge(self, count: int) -> None:
        """Accepts one sender and says that so many writes are done."""
        self.accept()
        file = self.take_offer()
        with mmap.mmap(file, 0) as ring:
            ring[DONE : DONE + 8] = struct.pack("=Q", count)
        os.close(file)
        self._link.send(PACKET.pack(WAKE, 0, 0, 0))

    def close(self) -> None:
        self._link.close()
        self._listener.close()
