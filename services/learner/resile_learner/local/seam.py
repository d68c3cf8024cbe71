"""The seam between the director of a local run and its launcher: events in, commands out."""

from dataclasses import dataclass
from typing import Literal

from resile_shared.messages.hosts import WorkerExit

from ..messages import FromWorker, Order, Pause, Stop
from .events import RunEvent


@dataclass(frozen=True)
class Begin:
    """Start the run. The first event, once."""


@dataclass(frozen=True)
class Said:
    """A worker said something."""

    message: FromWorker


@dataclass(frozen=True)
class Garbled:
    """A worker said something that nobody understands."""

    problem: str


@dataclass(frozen=True)
class Exited:
    """A worker's process has ended; all that it said was told before."""

    worker: int
    exit: WorkerExit


@dataclass(frozen=True)
class ResizeAsked:
    """Somebody wants another number of workers, as soon as possible and until further notice."""

    workers: int


@dataclass(frozen=True)
class StopAsked:
    """Somebody wants the run to end. Who asks twice does not want to wait."""


@dataclass(frozen=True)
class DeadlinePassed:
    """The time that a `StopBy` allowed is over."""


Event = Begin | Said | Garbled | Exited | ResizeAsked | StopAsked | DeadlinePassed


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``usage``: what was asked for was impossible, and nothing broke."""

    state: Literal["completed", "failed", "stopped"]
    error: str = ""
    details: str = ""
    usage: bool = False


@dataclass(frozen=True)
class Fork:
    """Start a worker."""

    worker: int


@dataclass(frozen=True)
class Send:
    """Tell a worker."""

    worker: int
    message: Order | Pause | Stop


@dataclass(frozen=True)
class Kill:
    """End a worker of which its peers hear nothing."""

    worker: int


@dataclass(frozen=True)
class Show:
    """Tell those who watch."""

    event: RunEvent


@dataclass(frozen=True)
class StopBy:
    """Say `DeadlinePassed` after so many seconds."""

    seconds: float


@dataclass(frozen=True)
class End:
    """The run is over: kill what is left of it."""

    outcome: Outcome


Command = Fork | Send | Kill | Show | StopBy | End
