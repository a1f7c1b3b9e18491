"""A rail that breaks: its TCP connections, of the parties in this process, are shut down under the provider."""

import os
import socket
import stat
from contextlib import suppress

STOLEN_BYTES = 1 << 22


def cut_connections(node: str) -> int:
    """All that go from or to `node`, an address of one rail alone; what lies in their buffers, pages or the news of
    their delivery, is lost. Returns how many there were."""
    cut = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = os.dup(int(name))
        except OSError:  # closed by now
            continue
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.close(fd)
            continue
        with socket.socket(fileno=fd) as sock:
            cut += _is_connection(sock, node) and _break(sock)
    return cut


def _is_connection(sock: socket.socket, node: str) -> bool:
    try:
        ends = sock.getsockname(), sock.getpeername()
    except OSError:
        return False
    return any(isinstance(end, tuple) and end[0] == node for end in ends)


def _break(sock: socket.socket) -> bool:
    with suppress(BlockingIOError):
        sock.recv(STOLEN_BYTES, socket.MSG_DONTWAIT)
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # its other end was cut before
        return False
    return True
