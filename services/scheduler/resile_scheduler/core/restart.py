"""The scheduler's core, which goes on without a report, a heartbeat or a request that it cannot handle.

A core that raises may have changed in part: a job that nobody knows of, or a slot that is taken twice. So it starts
over from what is stored, as a new leader does. The sender of the event bears the cost: the job that a report is about
fails before anything is decided, the heartbeats of a host are ignored for a while, and a request is refused. If the
core cannot start over either, the event is not at fault.
"""

from collections.abc import Callable, Mapping, Sequence

from resile_shared.messages.commands import PoolPolicy
from resile_shared.messages.hosts import Heartbeat, HostRecord
from resile_shared.messages.reports import Report

from .core import Scheduler
from .events import (
    Command,
    Event,
    HostRemoved,
    JobFault,
    JobRemoved,
    PoolSuspendRequested,
    Request,
    StateRestored,
    StoreJob,
    StorePolicy,
    StoreTenants,
    StoreUsage,
    WriteAllocation,
)
from .slots.decisions import SlotCounts
from .state.pool import number_of

MAX_REASON = 300
"""The most characters of an error that go into the history of its job."""
IGNORED_SECONDS = 60.0
"""How long a host's heartbeats are ignored after one crashed the core; rebuilding it is expensive in a large pool."""


class RestartableScheduler:
    """A `Scheduler` with the same events and queries, and `without`.

    ``new`` creates it from the policy that takes precedence over the stored one; None: there is none.
    """

    def __init__(self, new: Callable[[PoolPolicy | None], Scheduler], *, chosen: PoolPolicy | None = None) -> None:
        self._new = new
        self._core = new(chosen)
        self._stored = _Stored()
        self._ignored_until: dict[str, float] = {}
        """When the heartbeats of a host are handled again after one that raised, by host."""
        self.epoch = self._core.epoch

    def handle(self, event: Event, *, now: float) -> list[Command]:
        """Handle ``event`` as `Scheduler.handle` does. Raises InternalError."""
        if isinstance(event, Heartbeat) and now < self._ignored_until.get(event.host, now):
            return []
        commands = self._core.handle(event, now=now)
        self._stored.note_event(event, epoch=self.epoch)
        self._stored.note_commands(commands)
        return commands

    def without(self, event: Report | Heartbeat | Request, fault: str, *, now: float) -> StateRestored:
        """Start over without ``event``, whose handling raised ``fault``; return the event to handle next."""
        self._core = self._new(None)
        if isinstance(event, Heartbeat):
            still = {host: until for host, until in self._ignored_until.items() if until > now}
            self._ignored_until = still | {event.host: now + IGNORED_SECONDS}
        job_fault = _fault_of(event, fault) if isinstance(event, Report) else None
        return self._stored.restored(job_fault, ignored_hosts=frozenset(self._ignored_until))

    def explain(self) -> Mapping[str, str]:
        """Return why each job that shares slots has what it has, or what it is waiting for."""
        return self._core.explain()

    def slot_counts(self) -> SlotCounts:
        """Return how many slots are held and free, and how many more jobs could use."""
        return self._core.slot_counts()


def _fault_of(report: Report, fault: str) -> JobFault:
    text = " ".join(fault.split())
    reason = (
        f"the scheduler cannot handle the report {report.content.kind!r} of worker {report.worker}"
        f" ({text[:MAX_REASON]}): please report it with the scheduler's log"
    )
    return JobFault(report.job, reason)


class _Stored:
    """What a new leader would find once all commands so far are carried out."""

    def __init__(self) -> None:
        self._take_over(StateRestored())

    def _take_over(self, event: StateRestored) -> None:
        self._jobs = {record.job: record for record in event.jobs}
        self._allocations = {allocation.job: allocation for allocation in event.allocations}
        self._hosts = {host.host: host for host in event.hosts}
        self._last_number, self._is_suspended = event.last_number, event.is_suspended
        self._policy, self._tenants = event.policy, event.tenants
        self._usage = {usage.tenant: usage for usage in event.removed_usage}

    def note_event(self, event: Event, *, epoch: int) -> None:
        match event:
            case StateRestored():
                self._take_over(event)
            case HostRecord():
                self._hosts[event.host] = event
            case HostRemoved(host):
                self._hosts.pop(host, None)
            case JobRemoved(job):
                self._jobs.pop(job, None)
                self._allocations.pop(job, None)
                self._last_number = max(self._last_number, number_of(job))
            case PoolSuspendRequested():
                self._is_suspended = self._is_suspended or event.epoch == epoch

    def note_commands(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case StoreJob(record):
                    self._jobs[record.job] = record
                case WriteAllocation(allocation):
                    self._allocations[allocation.job] = allocation
                case StorePolicy(record):
                    self._policy = record
                case StoreTenants(record):
                    self._tenants = record
                case StoreUsage(usage):
                    self._usage[usage.tenant] = usage

    def restored(self, fault: JobFault | None, *, ignored_hosts: frozenset[str]) -> StateRestored:
        return StateRestored(
            tuple(self._jobs.values()),
            tuple(self._allocations.values()),
            tuple(self._hosts.values()),
            last_number=self._last_number,
            policy=self._policy,
            tenants=self._tenants,
            removed_usage=tuple(self._usage.values()),
            is_suspended=self._is_suspended,
            ignored_hosts=ignored_hosts,
            fault=fault,
        )
