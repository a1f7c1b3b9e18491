"""The socket that clients connect to."""

import errno
import socket

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError that names the address.

    Made by hand, with its protocol named: asyncio sets TCP_NODELAY only on such sockets, and without it every event
    of a stream waits 40 ms for the client's delayed acknowledgement."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        advice = "; --port 0 takes any free port" if error.errno == errno.EADDRINUSE else ""
        raise OSError(error.errno, f"{error.strerror}: {host}, port {port}{advice}") from error
    return listener
