"""The events that the core handles and the commands that it returns.

Host records, heartbeats and reports are events as they arrive from the bus.
"""

from dataclasses import dataclass

from resile_shared.messages.allocations import Allocation
from resile_shared.messages.commands import (
    Accepted,
    JobDelete,
    JobPause,
    JobPriority,
    JobResume,
    JobStop,
    PoolPolicy,
    Refused,
    TenantDelete,
    TenantSet,
)
from resile_shared.messages.hosts import Heartbeat, HostRecord
from resile_shared.messages.jobs import HistoryItem, JobRecord, JobSpec
from resile_shared.messages.pool import PolicyRecord, TenantsRecord
from resile_shared.messages.reports import CheckpointSaved, Report
from resile_shared.messages.usage import RemovedUsage

from ..policies.demand import Policy


@dataclass(frozen=True)
class JobFault:
    """Why a job has to end: a report of it could not be handled."""

    job: str
    reason: str


@dataclass(frozen=True)
class StateRestored:
    """What is stored, as a new leader reads it or as this one starts over with it (`restart.py`). The first event."""

    jobs: tuple[JobRecord, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    hosts: tuple[HostRecord, ...] = ()
    last_number: int = 0
    """The highest number of a job that is gone, or whose record cannot be read."""
    policy: PolicyRecord | None = None
    """The stored policy; None: it was never changed."""
    tenants: TenantsRecord | None = None
    """The configured tenants; None: no tenant was ever configured."""
    removed_usage: tuple[RemovedUsage, ...] = ()
    is_suspended: bool = False
    """Whether the pool is about to stop."""
    ignored_hosts: frozenset[str] = frozenset()
    """Hosts with a recent heartbeat that could not be handled."""
    fault: JobFault | None = None
    """The fault of a job, which ends before anything is decided."""


@dataclass(frozen=True)
class JobSubmitted:
    """A user submits a job, which gets the id ``job`` or, without one, the next number."""

    command: str
    spec: JobSpec
    job: str = ""


@dataclass(frozen=True)
class JobChangeRequested:
    """A user wants to change a job; ``command`` is the id of the request."""

    command: str
    request: JobPriority | JobStop | JobPause | JobResume | JobDelete


@dataclass(frozen=True)
class JobNotStored:
    """The bus has finally refused to store the job, which cannot go on without that."""

    job: str
    reason: str


@dataclass(frozen=True)
class PoolSuspendRequested:
    """The pool is about to stop: all jobs are suspended, and none starts.

    ``command`` is the id of the request, ``epoch`` that of the scheduler to which it is addressed.
    """

    command: str
    epoch: int


@dataclass(frozen=True)
class PolicyChangeRequested:
    """An operator wants another policy; ``command`` is the id of the request."""

    command: str
    request: PoolPolicy


@dataclass(frozen=True)
class TenantChangeRequested:
    """An operator wants to change what a tenant gets; ``command`` is the id of the request."""

    command: str
    request: TenantSet | TenantDelete


@dataclass(frozen=True)
class JobRemoved:
    """Nothing is stored for the job any more."""

    job: str


@dataclass(frozen=True)
class HostRemoved:
    """The registry has removed the record of a host that had been gone for a long time."""

    host: str


@dataclass(frozen=True)
class PolicyChanged:
    """From now on ``policy`` decides how many workers each job has; ``cause`` is the reason in the histories."""

    policy: Policy
    cause: str


@dataclass(frozen=True)
class Tick:
    """Time has passed: deadlines are checked. Due about once a second."""


@dataclass(frozen=True)
class ProbeExpired:
    """The time to answer a `ProbeHost` has passed; answers that came in time are events before this one."""

    host: str
    incarnation: int
    beat: int


Request = JobSubmitted | JobChangeRequested | PoolSuspendRequested | PolicyChangeRequested | TenantChangeRequested
"""Events that get an answer."""

Event = (
    StateRestored
    | Request
    | JobNotStored
    | JobRemoved
    | HostRemoved
    | PolicyChanged
    | HostRecord
    | Heartbeat
    | Report
    | Tick
    | ProbeExpired
)


@dataclass(frozen=True)
class StoreJob:
    """Store the record together with the new items of its history, which are published once they are stored."""

    record: JobRecord
    items: tuple[HistoryItem, ...] = ()


@dataclass(frozen=True)
class WriteAllocation:
    """Store the allocation. With all addresses it is the order to the workers."""

    allocation: Allocation


@dataclass(frozen=True)
class StorePolicy:
    """Store how jobs share the slots of the pool, then publish that it was changed."""

    record: PolicyRecord


@dataclass(frozen=True)
class StoreTenants:
    """Store the tenants that are configured, then publish which one was changed."""

    record: TenantsRecord


@dataclass(frozen=True)
class StoreUsage:
    """Store what the removed jobs of a tenant have used, before the records of jobs."""

    usage: RemovedUsage


@dataclass(frozen=True)
class AssignJobs:
    """Tell the agent of ``host`` to watch the allocations of these jobs, and of no others.

    It builds the environments of ``environments``, in this order, and of no other jobs. Repeated with every heartbeat
    until it names the same jobs.
    """

    host: str
    incarnation: int
    jobs: tuple[str, ...]
    environments: tuple[str, ...] = ()


@dataclass(frozen=True)
class StopWorkers:
    """Tell the agent of ``host`` to stop these workers, and to report those it does not have as gone, not started.

    Repeated with every heartbeat until they are gone.
    """

    job: str
    host: str
    incarnation: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class PauseWorkers:
    """Tell the members of ``lineage``, through the agents of ``hosts``, to save a checkpoint and stop training.

    Repeated until one is saved.
    """

    job: str
    lineage: int
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class RemoveJob:
    """Remove all that is stored of a job, and ``package`` unless other jobs use it; then return `JobRemoved`.

    With ``keeps_results`` its final model and its output stay in storage.
    """

    job: str
    package: str
    is_package_used: bool = False
    """Whether other jobs use its package, which stays."""
    keeps_results: bool = False
    checkpoint: CheckpointSaved | None = None
    """The newest that was reported as stored: a storage that does not show it does not show all there is."""


@dataclass(frozen=True)
class ProbeHost:
    """Ask the agent of ``host`` for a heartbeat at once, and return `ProbeExpired` after ``seconds``.

    ``beat`` is the number of its last heartbeat.
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


Command = (
    StoreJob
    | StorePolicy
    | StoreTenants
    | StoreUsage
    | AssignJobs
    | WriteAllocation
    | StopWorkers
    | PauseWorkers
    | ProbeHost
    | RemoveJob
    | Reply
)
