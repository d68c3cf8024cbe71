"""What crosses the edge of the core: events in, commands out.

Host records, heartbeats and reports come in as they are on the bus.
"""

from dataclasses import dataclass

from resile_shared.messages.allocations import Allocation
from resile_shared.messages.commands import Accepted, JobPause, JobPriority, JobResume, JobStop, Refused
from resile_shared.messages.hosts import Heartbeat, HostRecord
from resile_shared.messages.jobs import JobRecord, JobSpec
from resile_shared.messages.reports import Report

from .policies import Policy


@dataclass(frozen=True)
class StateRestored:
    """What is stored, read by a scheduler that has taken the lease. Its first event."""

    jobs: tuple[JobRecord, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    hosts: tuple[HostRecord, ...] = ()


@dataclass(frozen=True)
class JobSubmitted:
    """A user submits a job, which gets the id ``job`` or, without one, the next number."""

    command: str
    spec: JobSpec
    job: str = ""


@dataclass(frozen=True)
class JobChangeRequested:
    """Somebody asks for a change of a job; ``command`` is the id of the request."""

    command: str
    request: JobPriority | JobStop | JobPause | JobResume


@dataclass(frozen=True)
class PolicyChanged:
    """From now on ``policy`` decides how many workers each job has; ``cause`` is the reason in the histories."""

    policy: Policy
    cause: str


@dataclass(frozen=True)
class Tick:
    """Time passes: deadlines are looked at. Due about once a second."""


@dataclass(frozen=True)
class ProbeExpired:
    """The time for an answer to a `ProbeHost` has passed; what came until then was told before."""

    host: str
    incarnation: int
    beat: int


Event = (
    StateRestored
    | JobSubmitted
    | JobChangeRequested
    | PolicyChanged
    | HostRecord
    | Heartbeat
    | Report
    | Tick
    | ProbeExpired
)


@dataclass(frozen=True)
class StoreJob:
    """Store the record; events are published from its history."""

    record: JobRecord


@dataclass(frozen=True)
class WriteAllocation:
    """Store the allocation. With all addresses it is the order to the workers."""

    allocation: Allocation


@dataclass(frozen=True)
class StopWorkers:
    """Tell the agent of ``host`` to end these workers, and to report those it does not have as gone, not started.

    Repeated with every heartbeat until they are gone.
    """

    job: str
    host: str
    incarnation: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class PauseWorkers:
    """Have the agents of ``hosts`` tell the members of ``generation`` to save a checkpoint and to go no further.

    Repeated until one is saved.
    """

    job: str
    generation: int
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class ProbeHost:
    """Ask the agent of ``host`` for a heartbeat at once, and tell after ``seconds`` that the time for it has passed.

    ``beat`` is the number of its last one.
    """

    host: str
    incarnation: int
    beat: int
    seconds: float


@dataclass(frozen=True)
class Reply:
    """Answer the request ``command``; what it changed is stored by then."""

    command: str
    answer: Accepted | Refused


Command = StoreJob | WriteAllocation | StopWorkers | PauseWorkers | ProbeHost | Reply
