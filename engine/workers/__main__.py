"""`python -m engine.workers FD PARENT NAME`: a worker of the process PARENT, which holds the other end of the socket
FD. Started by `process`, never by hand."""

import logging
import os
import socket
import sys

from engine.workers.parent import die_with


def main(fd: int, parent: int, name: str) -> int:
    die_with(parent)
    # Only now what takes seconds to import: the parent may die meanwhile.
    from engine.workers.channel import Channel
    from engine.workers.messages import Order
    from engine.workers.rank import serve
    from protocol.logs import setup_logging

    setup_logging(name, logging.WARNING)
    with Channel[Order](socket.socket(fileno=fd), Order) as channel:
        return serve(channel)


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    sys.stderr.flush()
    os._exit(status)  # taking torch down in good order takes a second, and nothing is left to save
