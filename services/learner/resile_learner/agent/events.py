"""What crosses the edge of the agent's core: events in, commands out.

Allocations, host records and instructions come in, and heartbeats and reports go out, as they are on the bus.
"""

from dataclasses import dataclass

from resile_shared.messages.allocations import Allocation
from resile_shared.messages.hosts import Heartbeat, HostRecord, WorkerExit
from resile_shared.messages.instructions import PauseWorkers, SendHeartbeat, StopWorkers
from resile_shared.messages.reports import Report

from ..messages import FromWorker, Order, Pause


@dataclass(frozen=True)
class AllocationGone:
    """The allocation of ``job`` is no longer stored."""

    job: str


@dataclass(frozen=True)
class Said:
    """A worker of ``job`` said something."""

    job: str
    message: FromWorker


@dataclass(frozen=True)
class Garbled:
    """A worker said something that nobody understands."""

    job: str
    worker: int
    problem: str


@dataclass(frozen=True)
class Exited:
    """A worker's process has ended, or could not be started; all that it said was told before."""

    job: str
    worker: int
    exit: WorkerExit


@dataclass(frozen=True)
class Tick:
    """Time passes. Due every ``beat_seconds``."""

    is_bus_up: bool


Event = (
    Allocation
    | AllocationGone
    | HostRecord
    | StopWorkers
    | PauseWorkers
    | SendHeartbeat
    | Said
    | Garbled
    | Exited
    | Tick
)


@dataclass(frozen=True)
class SayHello:
    """Present the host."""


@dataclass(frozen=True)
class Start:
    """Start a worker; say `Exited` if that fails."""

    job: str
    worker: int
    slot: int
    resume: bool


@dataclass(frozen=True)
class Send:
    """Tell a worker."""

    job: str
    worker: int
    message: Order | Pause


@dataclass(frozen=True)
class Kill:
    """End a worker at once, or its start."""

    job: str
    worker: int


@dataclass(frozen=True)
class End:
    """This incarnation is over: end all workers, and come back with a higher one unless ``is_superseded``."""

    reason: str
    is_superseded: bool = False


Command = SayHello | Start | Send | Kill | Heartbeat | Report | End
