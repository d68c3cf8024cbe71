"""The events that the agent's core handles, and the commands that it returns.

Allocations, host records, instructions, heartbeats and reports are the messages on the bus.
"""

from dataclasses import dataclass

from resile_shared.messages.allocations import Allocation
from resile_shared.messages.hosts import Heartbeat, HostRecord, WorkerExit
from resile_shared.messages.instructions import AssignJobs, PauseWorkers, SendHeartbeat, StopWorkers
from resile_shared.messages.reports import Report

from ..messages import FromWorker, Order, Pause


@dataclass(frozen=True)
class AllocationGone:
    """The allocation of ``job`` is no longer stored."""

    job: str


@dataclass(frozen=True)
class MessageReceived:
    """A worker of ``job`` sent a message."""

    job: str
    message: FromWorker


@dataclass(frozen=True)
class WorkerExited:
    """A worker's process has ended, or could not be started. All its messages were handled before."""

    job: str
    worker: int
    exit: WorkerExit


@dataclass(frozen=True)
class Tick:
    """Time has passed. Due once every heartbeat interval."""

    is_bus_up: bool
    num_waiting: int = 0
    """Facts that workers reported and that are not published yet."""


Event = (
    Allocation
    | AllocationGone
    | HostRecord
    | AssignJobs
    | StopWorkers
    | PauseWorkers
    | SendHeartbeat
    | MessageReceived
    | WorkerExited
    | Tick
)


@dataclass(frozen=True)
class AnnounceHost:
    """Announce the host to the registry."""


@dataclass(frozen=True)
class WatchAllocation:
    """Watch the allocation of ``job``: it is an event as it is now, and at each change."""

    job: str


@dataclass(frozen=True)
class UnwatchAllocation:
    """End the watch of the allocation of ``job``."""

    job: str


@dataclass(frozen=True)
class StartWorker:
    """Start a worker. If that fails, `WorkerExited` reports it."""

    job: str
    worker: int
    slot: int


@dataclass(frozen=True)
class SendToWorker:
    """Send a message to a worker."""

    job: str
    worker: int
    message: Order | Pause


@dataclass(frozen=True)
class KillWorker:
    """Kill a worker at once, or cancel its start."""

    job: str
    worker: int


@dataclass(frozen=True)
class EndIncarnation:
    """End this incarnation and all its workers, then start a higher one unless ``is_superseded``."""

    reason: str
    is_superseded: bool = False


Command = (
    AnnounceHost
    | WatchAllocation
    | UnwatchAllocation
    | StartWorker
    | SendToWorker
    | KillWorker
    | Heartbeat
    | Report
    | EndIncarnation
)
