"""Classifies the end of a worker's process, and distinguishes the kernel's out-of-memory kills from others."""

import signal
from collections.abc import Iterator
from pathlib import Path

from resile_shared.control_groups import own_folders
from resile_shared.messages.hosts import AFTER_TRAINING, WorkerExit

from ..messages import Failed, Finished, Left, Trained

LastMessage = Trained | Finished | Left | Failed | None


def classify(status: int, last_message: LastMessage, *, memory_ran_out: bool) -> WorkerExit:
    """Classify a process that exited with ``status`` (minus the signal, if killed) after ``last_message``."""
    match last_message:
        case Failed(is_state_lost=True, message=message):
            return WorkerExit(kind="abandoned", status=status, message=message)
        case Failed(message=message, details=details, is_refusal=is_refusal):
            return WorkerExit(kind="failed", status=status, message=message, details=details, is_refusal=is_refusal)
        case Finished():  # the script is complete: how the process is taken down afterwards changes nothing
            return WorkerExit(kind="finished", status=status)
        case _ if status == -signal.SIGKILL and memory_ran_out:
            return WorkerExit(kind="out of memory", status=status)
        case _ if status < 0:
            return WorkerExit(kind="killed", status=status)
        case Trained() if status == 0:  # the script ended its process itself, as by os._exit
            return WorkerExit(kind="finished")
        case Trained():  # its agent may report this before another agent reports that training is complete
            return WorkerExit(kind="exited", status=status, message=AFTER_TRAINING)
        case Left() if status == 0:
            return WorkerExit(kind="left")
        case _:
            return WorkerExit(kind="exited", status=status)


class OutOfMemoryKills:
    """Counts the kernel's out-of-memory kills in this control group, or on the machine where the group has no count."""

    def __init__(self) -> None:
        self._accounted = _count()

    def claim(self) -> bool:
        """Whether there was a kill that no earlier call has claimed. Call it once for each worker that was killed."""
        if _count() <= self._accounted:
            return False
        self._accounted += 1
        return True


def _count() -> int:
    for source in _sources():
        try:
            lines = source.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def _sources() -> Iterator[Path]:
    for own in own_folders("memory"):
        yield from (own / "memory.events", own / "memory.oom_control")
    yield Path("/proc/vmstat")
