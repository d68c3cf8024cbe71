"""How a worker's process came to its end, and how to tell the user."""

import signal
from dataclasses import dataclass
from typing import Literal

from ..messages import Failed, Finished, Left

Kind = Literal["finished", "left", "failed", "exited", "killed", "out of memory", "abandoned", "not started"]
LastWord = Finished | Left | Failed | None


@dataclass(frozen=True)
class Exit:
    """The end of a worker's process.

    ``kind``: *finished* its training call and script; *left* the generation as ordered; *failed* and said so; *exited*
    without a word; *killed* by a signal; killed as the machine ran *out of memory*; *abandoned* as the zygote died;
    *not started* at all. ``status`` is the exit status, or minus the signal.
    """

    worker: int
    kind: Kind
    status: int = 0
    message: str = ""
    details: str = ""

    def describe(self) -> str:
        """One line for the user, without what to do about it."""
        who = f"worker {self.worker}"
        match self.kind:
            case "finished" | "left":
                return f"{who} {self.kind}"
            case "failed":
                return f"{who} failed: {self.message}"
            case "exited":
                return f"{who} ended its process with exit status {self.status}"
            case "killed":
                return f"{who} was killed by {signal_name(-self.status)}"
            case "out of memory":
                return f"{who} was killed because memory ran out; fewer workers or a smaller batch need less"
            case "abandoned":
                return f"{who} was lost because the process that starts workers was killed"
            case "not started":
                return f"{who} could not be started: {self.message}"


def classify(worker: int, status: int, last_word: LastWord, *, memory_ran_out: bool) -> Exit:
    """Judge the end of a process that exited with ``status`` (minus the signal, if killed) after ``last_word``."""
    match last_word:
        case Failed(message=message, details=details):
            return Exit(worker, "failed", status, message, details)
        case Finished():  # the script is through: what happens while the process is taken down changes nothing
            return Exit(worker, "finished", status)
        case _ if status == -signal.SIGKILL and memory_ran_out:
            return Exit(worker, "out of memory", status)
        case _ if status < 0:
            return Exit(worker, "killed", status)
        case Left() if status == 0:
            return Exit(worker, "left")
        case _:
            return Exit(worker, "exited", status)


def signal_name(number: int) -> str:
    """For example ``SIGSEGV (Segmentation fault)``."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    description = signal.strsignal(number)
    return f"{name} ({description})" if description else name
