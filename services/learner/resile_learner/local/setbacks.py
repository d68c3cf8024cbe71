"""Which ends of workers a local run puts up with.

- A worker that was killed by SIGKILL was killed from outside: that is never the script's fault.
- An error of the script is forgiven once at one iteration: if the same shard raises on a second worker, it will on all.
  So it is with a joiner's error before it was a member, once in the run.
- Three crashes (other signals, memory that ran out) at one iteration end the run.
- An error of the script before training or after it ends the run at once.
"""

import signal

from resile_shared.messages.hosts import WorkerExit

MAX_FAULTS = 2
MAX_CRASHES = 3
SCRIPT_FAULTS = ("failed", "exited")
SURVIVABLE = ("killed", "left", "out of memory", *SCRIPT_FAULTS)


class Setbacks:
    """Counts them."""

    def __init__(self) -> None:
        self._iteration = -1
        self._faults = 0
        self._crashes = 0
        self._failed_joiners = 0

    def ends_run(self, exit_: WorkerExit, *, iteration: int, is_training: bool, was_member: bool) -> bool:
        """Count the unexpected end of a worker, when so many iterations were known to be committed; judge it."""
        if exit_.kind not in SURVIVABLE:
            return True
        if iteration > self._iteration:
            self._iteration, self._faults, self._crashes = iteration, 0, 0
        if exit_.kind in SCRIPT_FAULTS:
            if was_member:
                self._faults += 1
            else:
                self._failed_joiners += 1
            return not is_training or max(self._faults, self._failed_joiners) >= MAX_FAULTS
        if exit_.kind == "left" or (exit_.status == -signal.SIGKILL and exit_.kind == "killed"):
            return False
        self._crashes += 1
        return self._crashes >= MAX_CRASHES
