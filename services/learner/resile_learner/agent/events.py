"""The events that the agent's core handles, and the commands that it returns.

Allocations, host records, instructions, heartbeats and reports are the messages on the bus.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from resile_shared.messages.allocations import Allocation
from resile_shared.messages.hosts import EnvironmentReport, Heartbeat, HostRecord, WorkerExit
from resile_shared.messages.instructions import AssignJobs, PauseWorkers, SendHeartbeat, StopWorkers
from resile_shared.messages.reports import Report

from ..messages import FromWorker, GangPlace, Order, Pause


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
class WorkerPrepared:
    """The configuration of a worker is complete. ``key`` names the templates from which it may be forked."""

    job: str
    worker: int
    key: str


@dataclass(frozen=True)
class TemplateKept:
    """The previous incarnation of this host had a template of ``key`` with ``modules``."""

    name: str
    """Name that stands for a job in `PrepareTemplate`."""
    key: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class TemplateReady:
    """Workers can be forked from template ``number``."""

    number: int
    num_modules: int
    """Number of modules that the template has imported and the fork server has not."""
    num_bytes: int
    """Bytes of memory that the template shares with no other process."""


@dataclass(frozen=True)
class TemplateEnded:
    """Template ``number`` has ended, or could not be started. ``is_refused``: because of what it imported."""

    number: int
    reason: str
    is_refused: bool = False


@dataclass(frozen=True)
class WorkerExited:
    """A worker's process has ended, or could not be started. All its messages were handled before."""

    job: str
    worker: int
    exit: WorkerExit


@dataclass(frozen=True)
class Tick:
    """Time has passed. Due once per heartbeat interval."""

    is_bus_up: bool
    num_waiting: int = 0
    """Number of facts that workers reported and that are not published yet."""
    in_flight: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """The requests that each replica had, on average since the last tick."""


Event = (
    Allocation
    | AllocationGone
    | HostRecord
    | AssignJobs
    | StopWorkers
    | PauseWorkers
    | SendHeartbeat
    | MessageReceived
    | WorkerPrepared
    | TemplateKept
    | TemplateReady
    | TemplateEnded
    | WorkerExited
    | EnvironmentReport
    | Tick
)


@dataclass(frozen=True)
class AnnounceHost:
    """Announce the host to the registry."""


@dataclass(frozen=True)
class WatchAllocation:
    """Watch the allocation of ``job``: its present value is an event, and so is each change."""

    job: str


@dataclass(frozen=True)
class UnwatchAllocation:
    """End the watch of the allocation of ``job``."""

    job: str


@dataclass(frozen=True)
class PrepareEnvironments:
    """Build the environments of ``jobs``, in this order, and of no others; an `EnvironmentReport` follows each step."""

    jobs: tuple[str, ...]


@dataclass(frozen=True)
class StartWorker:
    """Start a worker: get its configuration, then wait for `ForkWorker`. If that fails, `WorkerExited` reports it."""

    job: str
    worker: int
    slot: int
    gang: GangPlace | None = None
    """The worker's place in its gang, if its job is a gang."""


@dataclass(frozen=True)
class ForkWorker:
    """Fork a worker from a template; None: from the fork server, because of ``reason``."""

    job: str
    worker: int
    template: int | None
    reason: str = ""


@dataclass(frozen=True)
class PrepareTemplate:
    """Start a template for the workers of ``job``; `TemplateReady` or `TemplateEnded` reports it."""

    number: int
    job: str
    """A job, or the name of a `TemplateKept`."""
    modules: tuple[str, ...]
    """Modules that the template imports after those of the script's head."""
    is_urgent: bool
    """Whether workers wait for the template; otherwise training has priority."""


@dataclass(frozen=True)
class EndTemplate:
    """End a template, but no worker that was forked from it."""

    number: int


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


HostCommand = PrepareEnvironments | StartWorker | ForkWorker | SendToWorker | KillWorker | PrepareTemplate | EndTemplate
"""Commands about processes of this host."""
Command = AnnounceHost | WatchAllocation | UnwatchAllocation | HostCommand | Heartbeat | Report | EndIncarnation
