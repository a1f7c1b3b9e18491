"""What people read goes to standard output through here; events go to the logs."""

import sys


def say(line: str = "") -> None:
    """One line, at once: whoever watches a cluster come up must not wait for a buffer."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
