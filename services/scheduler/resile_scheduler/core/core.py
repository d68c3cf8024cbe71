"""Who gets which slots: `Scheduler.handle` takes events and returns commands.

What is known is in `state/`. Requests of users are handled in `job_commands.py`, host records and heartbeats in
`host_events.py`, reports in `worker_reports.py`. When one of them, or time, has changed something, the losses of jobs
are answered (`losses/`), and then the slots are shared again (`slots/`). Neither knows the other: both write
generations (`allocator.py`), end jobs (`job_ends.py`) and treat gangs by their own rules (`gangs.py`). The commands
follow from comparing the state with what was stored, and with what agents report: records first, then replies, then
allocations.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from resile_shared.messages.commands import Accepted, PoolPolicy, Refused
from resile_shared.messages.hosts import Heartbeat, HostRecord
from resile_shared.messages.reports import Report
from resile_shared.policies import PolicyName
from resile_shared.recent_events import RecentEvents

from ..policies.demand import Policy, RankedPolicy
from ..policies.ranked import fairshare
from .accounting import Accounting
from .allocator import Allocator
from .events import (
    Command,
    Event,
    HostRemoved,
    JobChangeRequested,
    JobNotStored,
    JobRemoved,
    JobSubmitted,
    PolicyChanged,
    PolicyChangeRequested,
    PoolSuspendRequested,
    ProbeExpired,
    Reply,
    Request,
    StateRestored,
    TenantChangeRequested,
    Tick,
)
from .gangs import Gangs
from .host_events import HostEvents
from .job_commands import Answer, JobCommands
from .job_ends import JobEnds
from .losses.deadlines import Deadlines
from .losses.fork_server_deaths import ForkServerDeaths
from .losses.probing import HostProber
from .losses.recovery import Recovery
from .losses.worker_ends import WorkerEnds
from .observation_timer import ObservationTimer
from .outgoing import Outgoing
from .policy_choice import PolicyChoice, TenantShares
from .retention import Limits, Retention
from .slots.decisions import Decisions, SlotCounts
from .slots.environment_requests import EnvironmentRequests
from .state.pool import Cause, Pool
from .takeover import Takeover
from .worker_reports import WorkerReports


class Scheduler:
    """The state of the pool and all decisions about it. Only `handle` changes it; the queries return copies.

    ``epoch`` is that of its lease; the secrets of generations are derived from ``secret``; after ``detection_seconds``
    of silence the pool counts a host or worker as lost; jobs that ended are kept within ``limits``.
    ``policy`` decides until one of ``policies`` is chosen; ``chosen`` takes precedence over what is stored.
    """

    def __init__(
        self,
        *,
        epoch: int = 1,
        secret: str = "",
        policy: Policy = fairshare,
        detection_seconds: float = 3.0,
        limits: Limits | None = None,
        policies: Mapping[PolicyName, RankedPolicy] = MappingProxyType({}),
        chosen: PoolPolicy | None = None,
    ) -> None:
        self.epoch = epoch
        self._recent = RecentEvents("scheduler")
        pool = self._pool = Pool()
        self._accounting = Accounting(pool)
        allocator = Allocator(pool, epoch=epoch, secret=secret)
        ends = self._ends = JobEnds(pool, allocator)
        gangs = Gangs(pool, allocator, ends, detection_seconds=detection_seconds)
        self._recovery = Recovery(pool, allocator, ends, gangs, detection_seconds=detection_seconds)
        worker_ends = WorkerEnds(pool, allocator, ends)
        self._retention = Retention(pool, limits)
        self._job_commands = JobCommands(pool, allocator, ends, self._retention)
        self._prober = HostProber(pool, detection_seconds=detection_seconds)
        environments = EnvironmentRequests(pool, ends)
        self._host_events = HostEvents(pool, allocator, worker_ends, ForkServerDeaths(pool, ends), environments)
        self._worker_reports = WorkerReports(pool, allocator, ends, worker_ends, self._job_commands, self._prober)
        self._deadlines = Deadlines(pool, self._recovery, worker_ends, detection_seconds=detection_seconds)
        self._observing = ObservationTimer(pool)
        self._takeover = Takeover(pool, allocator, self._host_events, epoch=epoch)
        self._decisions = Decisions(pool, allocator, ends, gangs, environments, policy=policy)
        self._policy_choice = PolicyChoice(
            self._decisions, policies, initial=chosen or PoolPolicy(), attained=self._accounting.recent
        )
        self._tenant_shares = TenantShares(pool, self._policy_choice)
        self._outgoing = Outgoing(pool, environments)

    def handle(self, event: Event, *, now: float) -> list[Command]:
        """Handle ``event`` at ``now`` (seconds since the epoch); return the commands to be carried out, in order."""
        with self._recent.handling(event):
            return self._handle(event, now)

    def explain(self) -> Mapping[str, str]:
        """Return why each job that shares slots has what it has, or what it is waiting for."""
        return MappingProxyType(self._decisions.explain())

    def holders(self) -> Mapping[str, str]:
        """Return which job holds which slots, by the slots' names."""
        return MappingProxyType({slot.name: job for slot, (job, _) in self._pool.holders.items()})

    def slot_counts(self) -> SlotCounts:
        """Return how many slots are held and free, and how many more jobs could use."""
        return self._decisions.slot_counts()

    def _handle(self, event: Event, now: float) -> list[Command]:
        replies = self._apply(event, now)
        self._decide(now)
        if isinstance(event, JobSubmitted):
            replies = [self._with_warning(reply) for reply in replies]
        jobs = self._pool.take_touched(_jobs_of(event))
        hosts = self._pool.take_touched_hosts([event.host] if isinstance(event, HostRecord | Heartbeat) else [])
        self._accounting.count(jobs, now=now)
        outgoing = self._outgoing
        return [
            *self._accounting.take_changes(),
            *outgoing.records(jobs),
            *self._policy_choice.take_changes(),
            *self._tenant_shares.take_changes(),
            *replies,
            *outgoing.allocations(jobs),
            *outgoing.assignments(hosts),
            *outgoing.stops(event, jobs),
            *outgoing.pauses(jobs, now=now),
            *self._prober.take_probes(),
            *self._retention.removals(is_counted=self._accounting.is_counted, now=now),
        ]

    def _decide(self, now: float) -> None:
        """Decide until nothing changes: a decision can free what the next one uses. All have the same causes."""
        self._decisions.check(now=now)
        causes: list[Cause] = []
        while self._pool.has_changed:
            causes += self._pool.take_causes()
            due = self._pool.take_due(self._decisions.restless)
            for job in due:
                self._recovery.answer(job, now=now)
            self._decisions.decide(due, causes, now=now)

    def _with_warning(self, reply: Command) -> Command:
        match reply:
            case Reply(command, Accepted(job_id=str(job)) as answer) if warning := self._decisions.shortfall(job):
                return Reply(command, answer.model_copy(update={"warning": warning}))
        return reply

    def _apply(self, event: Event, now: float) -> list[Command]:
        if isinstance(event, Request):
            return [Reply(event.command, self._answer(event, now))]
        match event:
            case JobNotStored(job, reason):
                self._ends.on_not_stored(job, reason, now=now)
            case JobRemoved(job):
                self._retention.on_removed(job)
                self._outgoing.forget(job)
                self._accounting.on_removed(job)
            case HostRemoved(host):
                self._retention.on_host_removed(host)
                self._prober.forget(host)
            case PolicyChanged(policy, cause):
                self._decisions.change_policy(policy, cause)
            case StateRestored():
                self._outgoing.restore(event)
                self._takeover.restore(event, now=now)
                self._retention.restore(self._pool.jobs.values(), ignored_hosts=event.ignored_hosts)
                self._policy_choice.restore(event.policy, now=now)
                self._tenant_shares.restore(event.tenants)
                self._accounting.restore(event.removed_usage)
                if event.is_suspended:
                    self._decisions.suspend()
                if event.fault is not None:
                    self._ends.on_fault(event.fault, now=now)
            case _:
                self._observe(event, now)
        return []

    def _observe(self, event: HostRecord | Heartbeat | Report | Tick | ProbeExpired, now: float) -> None:
        match event:
            case HostRecord():
                self._retention.on_host(event.host)
                self._host_events.on_record(event, now=now)
                self._accounting.on_hosts_changed()
            case Heartbeat():
                self._host_events.on_heartbeat(event, now=now)
                self._accounting.on_hosts_changed()
            case Report():
                self._worker_reports.handle(event, now=now)
                self._observing.on_report(event.job, now=now)
            case Tick():
                self._deadlines.check(now=now)
                self._accounting.check(now=now)
                self._observing.check(now=now)
                self._retention.check(now=now)
            case ProbeExpired():
                self._prober.on_probe_expired(event, now=now)

    def _answer(self, request: Request, now: float) -> Answer:
        match request:
            case JobSubmitted():
                return self._job_commands.submit(request, now=now)
            case JobChangeRequested():
                return self._job_commands.change(request, now=now)
            case PoolSuspendRequested(epoch=epoch) if epoch != self.epoch:
                reason = f"the scheduler of epoch {epoch} is meant, and that of epoch {self.epoch} leads: ask again"
                return Refused(code="conflict", reason=reason)
            case PoolSuspendRequested():
                self._decisions.suspend()
                return Accepted(jobs=self._pool.jobs_with_slots())
            case PolicyChangeRequested():
                return self._policy_choice.change(request, now=now)
            case TenantChangeRequested():
                return self._tenant_shares.change(request, now=now)


def _jobs_of(event: Event) -> Iterable[str]:
    """Return the jobs that ``event`` names: what a report or a heartbeat changes may call for no decision."""
    match event:
        case Report(job=job) | JobNotStored(job):
            return [job]
        case JobChangeRequested(request=request):
            return [request.job_id]
        case Heartbeat(workers=workers):
            return {report.job for report in workers}
        case _:
            return []
