"""Children that do not outlive their parent. Linux only."""

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def dying_with_parent() -> Callable[[], None]:
    """Return a ``preexec_fn`` that has the kernel kill the child when the thread that starts it dies.

    Everything it needs is looked up here, so that the child only makes system calls between fork and exec.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()
    number = ctypes.c_ulong(signal.SIGKILL)

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return arm
