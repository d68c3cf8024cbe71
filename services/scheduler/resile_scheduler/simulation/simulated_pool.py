"""The scheduler's core in virtual time: jobs of known length on simulated hosts, without processes and clocks.

The core is the one that runs live: events go in by its `handle`, and what it commands is done by simulated agents
(`agents.py`) and workers (`workers.py`), which report to it like real ones.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType

from resile_shared.messages.allocations import Allocation
from resile_shared.messages.commands import PoolPolicy
from resile_shared.messages.hosts import Heartbeat, HostRecord, HostState, Labels, Slot
from resile_shared.messages.jobs import HistoryItem, JobRecord
from resile_shared.messages.message import at
from resile_shared.messages.pool import PolicyRecord, TenantsRecord
from resile_shared.messages.reports import Report
from resile_shared.messages.usage import RemovedUsage
from resile_shared.policies import PolicyName
from resile_shared.version import VERSION

from ..core.core import Scheduler
from ..core.events import (
    AssignJobs,
    Command,
    Event,
    HostRemoved,
    JobRemoved,
    JobSubmitted,
    PauseWorkers,
    ProbeExpired,
    ProbeHost,
    RemoveJob,
    StateRestored,
    StopWorkers,
    StoreJob,
    StorePolicy,
    StoreTenants,
    StoreUsage,
    Tick,
    WriteAllocation,
)
from ..core.retention import Limits
from ..core.state.pool import number_of
from ..policies.demand import Policy, RankedPolicy
from ..policies.ranked import fairshare
from .agents import SimulatedAgents
from .job import SimulatedJob
from .timeline import Timeline
from .workers import Delays, SimulatedWorkers
from .workload import Submission


class SimulatedPool:
    """A pool in virtual time. ``now``, ``hosts`` and what was stored can be read at any moment between two steps."""

    def __init__(
        self,
        *,
        policy: Policy = fairshare,
        policies: Mapping[PolicyName, RankedPolicy] = MappingProxyType({}),
        start: float = 1_000_000.0,
        chosen: PoolPolicy | None = None,
        limits: Limits | None = None,
        delays: Delays | None = None,
    ) -> None:
        self.start = start
        self.policy = policy
        self._epoch = 1
        self._policies = policies
        self._chosen = chosen
        self._limits = limits
        self._delays = delays or Delays()
        self.scheduler = self._new_scheduler()
        self.records: dict[str, JobRecord] = {}
        self.histories: dict[str, list[HistoryItem]] = {}
        self.allocations: list[Allocation] = []
        self.policy_record: PolicyRecord | None = None
        self.tenants_record: TenantsRecord | None = None
        self.removed_usage: dict[str, RemovedUsage] = {}
        self.removals: list[RemoveJob] = []
        self._timeline = Timeline(start)
        self._agents = SimulatedAgents(self._timeline, self._send)
        self._workers = SimulatedWorkers(self._timeline, self._agents, self._send, self._delays)
        self.hosts = self._agents.hosts
        self.assigned = self._agents.assigned
        self._last_number = 0
        self._events: deque[Event] = deque()
        self.channel: Callable[[Event], Iterable[Event]] = lambda event: (event,)
        """Called with each heartbeat or report that is sent; returns what arrives of it now."""
        self.on_stored: Callable[[StoreJob], object] = lambda stored: None
        """Called with each stored record and the items of its history that are stored with it."""

    @property
    def now(self) -> float:
        """Seconds since the epoch."""
        return self._timeline.now

    @now.setter
    def now(self, now: float) -> None:
        self._timeline.now = now

    # what happens to the pool

    def add_host(
        self,
        name: str,
        slots: int,
        *,
        device_class: str = "cpu",
        num_devices: int = 0,
        incarnation: int = 1,
        labels: Labels | None = None,
    ) -> None:
        """Add a host now; the workers of an earlier incarnation are gone. Its slots share ``num_devices``, if any."""
        devices = [f"cuda:{number}" for number in range(num_devices)] or ["cpu"]
        self._workers.lose_host(name)
        record = HostRecord(
            host=name,
            incarnation=incarnation,
            state=HostState.UP,
            address="10.0.0.1",
            slots=tuple(Slot(index=index, device=devices[index % len(devices)]) for index in range(slots)),
            labels=labels or {},
            device_class=device_class,
            version=VERSION,
            since=at(self.now),
        )
        self._agents.add(record)
        self.handle(record)

    def change_host(self, name: str, state: HostState) -> None:
        """Change the state of a host now; when it leaves or is lost, its workers end."""
        self.hosts[name] = self.hosts[name].model_copy(update={"state": state, "since": at(self.now)})
        if state in (HostState.LOST, HostState.LEFT):
            self._workers.lose_host(name)
        self.handle(self.hosts[name])

    def remove_host(self, name: str) -> None:
        """Remove the record of a host that has left."""
        self._agents.remove(name)
        self.handle(HostRemoved(name))

    def crash(self, name: str) -> None:
        """End a host and its workers now; it counts as lost once the pool detects its silence."""
        self._agents.silence(name)
        self._workers.lose_host(name)
        self.later(self._delays.detection, partial(self._lose_host, name))

    def _lose_host(self, host: str) -> None:
        if self._agents.is_silent(host):
            self.change_host(host, HostState.LOST)

    def kill(self, job: str, worker: int, *, kind: str = "killed") -> None:
        """End a worker now; if it is a member, the round in flight never ends."""
        self._workers.exit(self._workers.jobs[job], worker, kind)

    def submit(self, submissions: Iterable[Submission]) -> None:
        """Submit jobs at their times."""
        for submission in submissions:
            self.later(self.start + submission.time - self.now, partial(self._submit, submission))

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Call ``action`` ``seconds`` from now."""
        self._timeline.later(seconds, action)

    def handle(self, event: Event) -> list[Command]:
        """Pass an event to the core and execute its commands; events that these cause are handled afterwards."""
        self._events.append(event)
        if len(self._events) > 1:
            return []
        commands: list[Command] = []
        while self._events:
            new = self.scheduler.handle(self._events[0], now=self.now)
            commands += new
            for command in new:
                self._execute(command)
            self._events.popleft()
        return commands

    def restart_scheduler(self) -> None:
        """Replace the scheduler by a new one, which takes over what is stored."""
        self._epoch += 1
        self.scheduler = self._new_scheduler()
        newest = {allocation.job: allocation for allocation in self.allocations}
        stored = (tuple(self.records.values()), tuple(newest.values()), tuple(self.hosts.values()))
        restored = StateRestored(
            *stored,
            last_number=self._last_number,
            policy=self.policy_record,
            tenants=self.tenants_record,
            removed_usage=tuple(self.removed_usage.values()),
        )
        self.handle(restored)

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            epoch=self._epoch,
            secret="simulated",
            policy=self.policy,
            policies=self._policies,
            chosen=self._chosen,
            limits=self._limits,
            detection_seconds=self._delays.detection,
        )

    @property
    def next_time(self) -> float:
        """When the next action is due; infinite if there is none."""
        return self._timeline.next_time

    def step(self) -> bool:
        """Call the next action; return False if there is none."""
        return self._timeline.step()

    def run(self, *, until: float = float("inf"), watch: Callable[[], object] = lambda: None) -> None:
        """Let time pass until nothing is left to happen, or to ``until`` seconds after the start.

        ``watch`` is called after each action.
        """
        while self._timeline.next_time <= self.start + until and self.step():
            watch()
        if until < float("inf"):
            self.now = max(self.now, self.start + until)

    def members(self, job: str) -> tuple[int, ...]:
        """Return the workers that train this job now."""
        return self._jobs[job].members if job in self._jobs else ()

    def alive(self, job: str) -> tuple[int, ...]:
        """Return the workers of this job whose processes are alive."""
        return tuple(self._jobs[job].workers) if job in self._jobs else ()

    def hosts_of(self, job: str) -> set[str]:
        """Return the hosts on which processes of this job's workers are alive."""
        return {worker.host for worker in self._jobs[job].workers.values()} if job in self._jobs else set()

    def trained(self, job: str) -> set[int]:
        """Return the workers that ever were members."""
        return self._jobs[job].trained

    def iteration(self, job: str) -> int:
        """Return how many iterations its members have committed."""
        return self._jobs[job].iteration_at(self.now)

    def send_heartbeats(self) -> None:
        """Let every host send a heartbeat now, and the core check its deadlines."""
        self._agents.beat_all()
        self.handle(Tick())

    # the commands of the core

    @property
    def _jobs(self) -> dict[str, SimulatedJob]:
        return self._workers.jobs

    def _execute(self, command: Command) -> None:
        match command:
            case StoreJob(record, items):
                self.records[record.job] = record
                self.histories.setdefault(record.job, []).extend(items)
                self.on_stored(command)
            case StorePolicy() | StoreTenants() | StoreUsage():
                self._store(command)
            case WriteAllocation(allocation):
                self.allocations.append(allocation)
                self._workers.allocate(self._jobs[allocation.job], allocation)
            case AssignJobs(host, _, jobs):
                self.assigned[host] = jobs
            case StopWorkers(job=job, host=host, workers=workers):
                self.later(self._delays.exit, partial(self._stop, job, host, workers))
            case RemoveJob():
                self._remove(command)
            case PauseWorkers(job=job):
                self._workers.pause(self._jobs[job])
            case ProbeHost(host, incarnation, beat, seconds):
                self._agents.beat(host)
                self.later(seconds, partial(self.handle, ProbeExpired(host, incarnation, beat)))

    def _store(self, command: StorePolicy | StoreTenants | StoreUsage) -> None:
        match command:
            case StorePolicy(record):
                self.policy_record = record
            case StoreTenants(record):
                self.tenants_record = record
            case StoreUsage(usage):
                self.removed_usage[usage.tenant] = usage

    def _stop(self, name: str, host: str, numbers: Iterable[int]) -> None:
        if job := self._jobs.get(name):
            self._workers.stop(job, host, numbers)

    def _remove(self, command: RemoveJob) -> None:
        job = command.job
        self.removals.append(command)
        self._last_number = max(self._last_number, number_of(job))
        self._workers.remove(job)
        del self.records[job], self.histories[job]
        self.allocations = [allocation for allocation in self.allocations if allocation.job != job]
        self.later(0.0, partial(self.handle, JobRemoved(job)))

    def _submit(self, submission: Submission) -> None:
        self._jobs[submission.job] = SimulatedJob(submission)
        self.handle(JobSubmitted(f"submit {submission.job}", submission.spec, job=submission.job))

    def _send(self, event: Heartbeat | Report) -> None:
        for arriving in self.channel(event):
            self.handle(arriving)
