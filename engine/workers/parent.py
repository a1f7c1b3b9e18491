"""A worker does not outlive the process that started it."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """From now on the kernel kills this process when the thread of `parent` that started it ends; at once if `parent`
    is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it may have died before the call above
        os.kill(os.getpid(), signal.SIGKILL)
