"""What processes of Resile inherit: they do not outlive their parent, and may open many files. Linux only."""

import ctypes
import os
import resource
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


ENOUGH = 1 << 20


def raise_descriptor_limit() -> None:
    """Raise the limit of this process, and of those that it starts, as far as the system allows, to 1,048,576 at most.

    Most systems start a process with 1,024, for the sake of programs that call `select`, and allow far more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
