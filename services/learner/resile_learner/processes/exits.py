"""Classifies the end of a worker's process."""

import signal

from resile_shared.messages.hosts import WorkerExit

from ..messages import Failed, Finished, Left

LastMessage = Finished | Left | Failed | None


def classify(status: int, last_message: LastMessage, *, memory_ran_out: bool) -> WorkerExit:
    """Classify a process that exited with ``status`` (minus the signal, if killed) after ``last_message``."""
    match last_message:
        case Failed(message=message, details=details):
            return WorkerExit(kind="failed", status=status, message=message, details=details)
        case Finished():  # the script is complete: how the process is taken down afterwards changes nothing
            return WorkerExit(kind="finished", status=status)
        case _ if status == -signal.SIGKILL and memory_ran_out:
            return WorkerExit(kind="out of memory", status=status)
        case _ if status < 0:
            return WorkerExit(kind="killed", status=status)
        case Left() if status == 0:
            return WorkerExit(kind="left")
        case _:
            return WorkerExit(kind="exited", status=status)
