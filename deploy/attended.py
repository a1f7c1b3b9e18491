"""`python -m deploy.attended PARENT COMMAND...`: become COMMAND, and be killed when the process PARENT dies.

The kernel keeps the promise (PR_SET_PDEATHSIG survives exec), so not even a launcher killed with SIGKILL leaves a node
behind. Set here, after exec, because code between fork and exec is not safe in a process with threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def become(parent: int, command: list[str]) -> None:
    """Does not return, unless the parent is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() == parent:  # it may have died before the call above
        os.execvp(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
