"""The hosts of a pool: what agents report of them, and what the registry derives from that.

A message of an agent counts for its incarnation alone: a reader that has seen a higher one ignores it.
"""

import signal
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from .message import (
    MAX_INTEGER,
    MAX_SLOTS,
    CommandId,
    Count,
    Details,
    HostAddress,
    Id,
    Index,
    Line,
    Message,
    Port,
    Positive,
    Text,
    Time,
    Version,
)

MAX_SLOTS_OF_HOST = 1024
MAX_CORES = 1024
MAX_HOST_COMMANDS = 16
Core = Annotated[int, Field(ge=0, lt=65536)]
Labels = Annotated[
    dict[Annotated[Line, Field(max_length=100)], Annotated[Line, Field(max_length=200)]], Field(max_length=100)
]
DeviceClass = Annotated[str, Field(max_length=1000)]

LOCATION_LABELS = ("zone", "rack")
"""The labels that say where a host is, from the outside in."""


class Slot(Message):
    """What a worker occupies: an accelerator, or a share of CPU cores. Named ``<host>/<index>``."""

    index: Index
    device: str = Field(default="cpu", max_length=100, description="'cpu', or as torch names it: 'cuda:0'")
    cores: tuple[Core, ...] = Field(
        default=(), max_length=MAX_CORES, description="CPU cores the worker is bound to; empty: all"
    )


class HostHello(Message):
    """An agent presents its host. Sent at its start, at each change, and when the registry does not know the host."""

    host: Id
    incarnation: Positive = Field(description="rises with each start of the agent")
    address: HostAddress = Field(description="where peers reach the workers of this host")
    probe_port: Port | None = Field(default=None, description="where its agent says its name to whoever connects")
    slots: tuple[Slot, ...] = Field(max_length=MAX_SLOTS_OF_HOST)
    labels: Labels = Field(default_factory=dict)
    device_class: DeviceClass = Field(description="hosts of one class give the same bits")
    version: Version = ""


class HostGoodbye(Message):
    """An agent leaves on purpose; its workers are gone."""

    host: Id
    incarnation: Positive
    reason: Text = ""


class Address(Message):
    """Where a worker's peers reach it."""

    host: HostAddress
    port: Port


AFTER_TRAINING = "after training was complete"


class WorkerExit(Message):
    """How a worker's process ended.

    ``finished``: its training call and its script are complete; ``left``: released from its generation as ordered;
    ``failed``: it reported an error; ``exited``: without any report; ``killed``: by a signal; ``out of memory``: by the
    kernel; ``abandoned``: lost with its host; ``orphaned``: lost with its fork server, while its agent lived;
    ``not started``: it never ran.
    """

    kind: Literal[
        "finished", "left", "failed", "exited", "killed", "out of memory", "abandoned", "orphaned", "not started"
    ]
    status: int = Field(default=0, ge=-MAX_INTEGER, le=MAX_INTEGER, description="exit status, or minus the signal")
    message: Text = Field(
        default="",
        description="one line for the user; of an abandoned worker, the whole sentence; of one that exited, when",
    )
    details: Details = Field(default="", description="the traceback, where there is one")
    is_refusal: bool = Field(default=False, description="its script was refused: see `reports.Failed`")

    def describe(self, who: str) -> str:
        """Return one line for the user about the worker named ``who``, for example "worker 3 on host-1/2"."""
        match self.kind:
            case "finished" | "left":
                return f"{who} {self.kind}"
            case "failed":
                return f"{who} failed: {self.message}"
            case "exited":
                when = f", {self.message}" if self.message else ""
                return f"{who} ended its process with exit status {self.status}{when}"
            case "killed":
                hint = _BUS_ERROR if self.status == -signal.SIGBUS else ""
                return f"{who} was killed by {_signal_name(-self.status)}{hint}"
            case "out of memory":
                return f"{who} was killed because memory ran out; fewer workers or a smaller batch need less"
            case "abandoned" | "orphaned":
                return self.message or f"{who} was lost because the process that starts workers was killed"
            case "not started":
                return f"{who} could not be started: {self.message}"


_BUS_ERROR = (
    ": memory that it shares or a file that it maps could not grow, as when /dev/shm or the disk is full. Make "
    "/dev/shm larger (docker run --shm-size=8g), or free some disk space"
)


def _signal_name(number: int) -> str:
    """For example ``SIGSEGV (Segmentation fault)``."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    description = signal.strsignal(number)
    return f"{name} ({description})" if description else name


class WorkerReport(Message):
    """One worker as its agent sees it now.

    ``starting``: forked; ``ready``: reached its training call; ``member``: trains; ``left``: let go of its generation
    and is ending; ``gone``: its process has ended, and its slot is free.
    """

    job: Id
    worker: Count
    slot: Index
    state: Literal["starting", "ready", "member", "left", "gone"]
    address: Address | None = Field(default=None, description="known once the process listens")
    generation: Count = Field(default=0, description="the newest generation that it trained in; 0: none")
    iteration: Count = 0
    exit: WorkerExit | None = Field(default=None, description="set when gone")
    in_flight: float | None = Field(
        default=None,
        ge=0,
        le=MAX_INTEGER,
        exclude_if=lambda in_flight: in_flight is None,
        description="of a replica: the requests that it had, on average since the last tick",
    )


class EnvironmentReport(Message):
    """How far a host is with the environment of a job that the scheduler has named.

    ``waiting``: for the environments of other jobs; ``failed``: it is not tried again while the job stays named.
    """

    job: Id
    state: Literal["waiting", "building", "ready", "failed"] = "waiting"
    reason: Text = Field(default="", description="one line for the user, if it failed")
    is_hosts_fault: bool = Field(default=False, description="whether another host may succeed")


class Heartbeat(Message):
    """A host is alive, and this is all it runs. Sent once a second and at each change; never stored."""

    host: Id
    incarnation: Positive
    number: Count = Field(description="rises with each beat of an incarnation; an older beat is ignored")
    num_waiting: Count = Field(default=0, description="facts that its workers reported and that are not published yet")
    jobs: tuple[Id, ...] | None = Field(
        default=None,
        max_length=MAX_SLOTS_OF_HOST,
        description="the jobs that the scheduler has assigned to the host, by the newest instruction; null: none yet",
    )
    workers: tuple[WorkerReport, ...] = Field(default=(), max_length=MAX_SLOTS)
    environments: tuple[EnvironmentReport, ...] | None = Field(
        default=None,
        max_length=MAX_SLOTS_OF_HOST,
        description="of the jobs that the newest instruction names; null: the agent builds an environment only when a "
        "worker starts",
    )


class ProbeFailed(Message):
    """A host did not answer the scheduler, which no longer counts on its workers. Not stored, never repeated.

    Whether the host is lost is for the registry to decide; the message carries the trace of the loss to it.
    """

    host: Id
    incarnation: Positive


class HostState(StrEnum):
    """The state of a host, according to the registry."""

    UP = "up"
    DRAINING = "draining"
    LOST = "lost"
    LEFT = "left"


class HostRecord(Message):
    """One host as the registry stores it."""

    host: Id
    incarnation: Positive
    state: HostState
    address: HostAddress
    probe_port: Port | None = None
    slots: tuple[Slot, ...] = Field(max_length=MAX_SLOTS_OF_HOST)
    labels: Labels = Field(default_factory=dict)
    device_class: DeviceClass
    version: Version = ""
    since: Time = Field(description="when the state was entered")
    reason: Text = ""
    is_drained: bool = Field(default=False, description="whether this incarnation and the next ones take no workers")
    drain_deadline: Time | None = None
    applied_commands: tuple[CommandId, ...] = Field(
        default=(),
        max_length=MAX_HOST_COMMANDS,
        description="ids of the newest commands whose effect this record holds",
    )


class HostEvent(Message):
    """Root of what the registry announces."""

    host: Id
    incarnation: Positive
    time: Time
    reason: Text = ""


class HostJoined(HostEvent):
    """A host takes workers: it is new, back with a higher incarnation, changed, or no longer drained."""

    slots: tuple[Slot, ...] = Field(max_length=MAX_SLOTS_OF_HOST)
    labels: Labels = Field(default_factory=dict)


class HostDraining(HostEvent):
    """A host takes no more workers and lets go of those it has, until the deadline."""

    slots: tuple[Slot, ...] = Field(default=(), max_length=MAX_SLOTS_OF_HOST)
    labels: Labels = Field(default_factory=dict)
    deadline: Time | None = None


class HostLost(HostEvent):
    """A host was silent for too long; its workers are presumed dead."""


class HostLeft(HostEvent):
    """A host left on purpose."""
