"""The socket that clients connect to."""

import socket

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Made by hand, with its protocol named: asyncio sets TCP_NODELAY only on such sockets, and without it every event
    of a stream waits 40 ms for the client's delayed acknowledgement."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
