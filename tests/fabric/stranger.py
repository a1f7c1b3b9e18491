"""A child process of another user that comes to a landing. Prints "turned away" once its connection is closed."""

import json
import os
import sys

from tests.fabric.raw_peer import RawSender

NOBODY = 65534


def main() -> None:
    order = json.loads(sys.stdin.readline())
    os.setuid(NOBODY)
    with RawSender(bytes.fromhex(order["landing"])) as sender:
        turned_away = sender.wait_closed()
    sys.stdout.write("turned away\n" if turned_away else "let in\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
