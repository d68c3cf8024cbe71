"""Runs a command and ends all that it has started: `python -m resile_learner.processes.reaper PARENT COMMAND ...`.

``PARENT`` is the process id of the parent. When the command ends, everything below it is killed, daemons too, and this
process ends as the command did. When the parent ends, and on SIGTERM, the command is killed as well.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from resile_shared.processes import dying_with_parent

from .descendants import adopt_orphans, kill_all, signal_on_parent_death


def main(arguments: Sequence[str]) -> int:
    """Run the command to its end, and return its exit status. Does not return if a signal ended it."""
    parent, *command = arguments
    signal.signal(signal.SIGTERM, _exit)
    signal_on_parent_death(signal.SIGTERM)
    if os.getppid() != int(parent):
        return 1
    adopt_orphans()
    try:
        # All descriptors are passed on: a lock is held for as long as the command may write.
        status = subprocess.Popen(command, close_fds=False, preexec_fn=dying_with_parent()).wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_all()
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _exit(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
