"""Memory that other processes of this machine may map: a memfd, which never grows or shrinks under whoever reads it."""

import fcntl
import mmap
import os
import weakref

import torch

_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK


def create_memfd(name: str, size: int) -> int:
    """Zeroed; the descriptor is the caller's."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


class SharedFile:
    """The descriptor of a memfd, closed with the last reference to this. `offset`: where in it the memory begins that
    this belongs to. What is mapped outlives it."""

    def __init__(self, fd: int, offset: int = 0) -> None:
        self.fd = fd
        self.offset = offset
        weakref.finalize(self, os.close, fd)


def shared_bytes(name: str, size: int) -> tuple[torch.Tensor, SharedFile]:
    """Zeroed memory of its own, page-aligned, and its file."""
    fd = create_memfd(name, size)
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8), SharedFile(fd)
