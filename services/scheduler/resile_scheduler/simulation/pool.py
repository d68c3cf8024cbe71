"""The scheduler's core in virtual time: jobs of known length on simulated hosts, without processes and clocks.

The core is the one that runs live. Its commands start, stop and pause simulated workers, which join at a boundary,
train and leave like real ones, and report to the core. An iteration takes ``ceil(num_shards / workers)`` times the
job's ``shard_seconds``.
"""

import heapq
import signal
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from resile_shared.messages.allocations import Allocation
from resile_shared.messages.hosts import Address, Heartbeat, HostRecord, HostState, Slot, WorkerExit, WorkerReport
from resile_shared.messages.jobs import HistoryItem, JobRecord
from resile_shared.messages.message import at
from resile_shared.messages.pool import PolicyRecord
from resile_shared.messages.reports import CheckpointSaved, Completed, Content, PeerSuspected, Report, Switched
from resile_shared.policies import PolicyName

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
    Tick,
    WriteAllocation,
)
from ..core.pool import number_of
from ..core.retention import Limits
from ..policies.demand import Policy
from ..policies.fairshare import fairshare
from .job import SimulatedJob, SimulatedWorker
from .workload import Submission

FORK_SECONDS = 0.03
SCRIPT_SECONDS = 0.8
EXIT_SECONDS = 0.05
LISTED_SECONDS = 10.0
DETECTION_SECONDS = 3.0


class SimulatedPool:
    """A pool in virtual time. ``now``, ``hosts`` and what was stored can be read at any moment between two steps."""

    def __init__(
        self,
        *,
        policy: Policy = fairshare,
        policies: Mapping[PolicyName, Policy] = MappingProxyType({}),
        start: float = 1_000_000.0,
        limits: Limits | None = None,
    ) -> None:
        self.now = start
        self.start = start
        self._epoch = 1
        self.policy = policy
        self._policies = policies
        self._limits = limits
        self.scheduler = self._new_scheduler()
        self.records: dict[str, JobRecord] = {}
        self.histories: dict[str, list[HistoryItem]] = {}
        self.allocations: list[Allocation] = []
        self.policy_record: PolicyRecord | None = None
        self.removals: list[RemoveJob] = []
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._num_queued = 0
        self._jobs: dict[str, SimulatedJob] = {}
        self.hosts: dict[str, HostRecord] = {}
        self.assigned: dict[str, tuple[str, ...]] = {}
        """The jobs whose allocations each host watches."""
        self._last_number = 0
        self._silent: set[str] = set()
        self._beats = 0
        self._events: deque[Event] = deque()
        self.channel: Callable[[Event], Iterable[Event]] = lambda event: (event,)
        """Returns what arrives, now, of a heartbeat or report that is sent."""

    # what happens to the pool

    def add_host(self, name: str, slots: int, *, device_class: str = "cpu", incarnation: int = 1) -> None:
        """Add a host now."""
        record = HostRecord(
            host=name,
            incarnation=incarnation,
            state=HostState.UP,
            address="10.0.0.1",
            slots=tuple(Slot(index=index) for index in range(slots)),
            device_class=device_class,
            since=at(self.now),
        )
        self.hosts[name] = record
        self.assigned.pop(name, None)
        self._silent.discard(name)
        self.handle(record)

    def change_host(self, name: str, state: HostState) -> None:
        """Change the state of a host now; when it leaves or is lost, its workers end."""
        self.hosts[name] = self.hosts[name].model_copy(update={"state": state, "since": at(self.now)})
        if state in (HostState.LOST, HostState.LEFT):
            self._end_workers(name)
        self.handle(self.hosts[name])

    def remove_host(self, name: str) -> None:
        """Remove the record of a host that has left."""
        del self.hosts[name]
        self.handle(HostRemoved(name))

    def crash(self, name: str) -> None:
        """End a host and its workers now; it counts as lost after ``DETECTION_SECONDS`` of silence."""
        self._silent.add(name)
        self._end_workers(name)
        self.later(DETECTION_SECONDS, lambda: self._lose_host(name))

    def _lose_host(self, host: str) -> None:
        if host in self._silent:
            self.change_host(host, HostState.LOST)

    def _end_workers(self, host: str) -> None:
        for job in self._jobs.values():
            job.workers = {n: w for n, w in job.workers.items() if w.host != host}

    def kill(self, job: str, worker: int, *, kind: str = "killed") -> None:
        """End a worker now; if it is a member, the round in flight never ends."""
        self._exit(self._jobs[job], worker, kind)

    def submit(self, submissions: Iterable[Submission]) -> None:
        """Submit jobs at their times."""
        for submission in submissions:
            self.later(self.start + submission.time - self.now, lambda s=submission: self._submit(s))  # type: ignore[misc]

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Call ``action`` ``seconds`` from now."""
        self._num_queued += 1
        heapq.heappush(self._queue, (self.now + max(seconds, 0.0), self._num_queued, action))

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
        self.handle(StateRestored(*stored, last_number=self._last_number, policy=self.policy_record))

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            epoch=self._epoch, secret="simulated", policy=self.policy, policies=self._policies, limits=self._limits
        )

    def step(self) -> bool:
        """Call the next action; return False if there is none."""
        if not self._queue:
            return False
        time, _, action = heapq.heappop(self._queue)
        self.now = max(self.now, time)
        action()
        return True

    def run(self, *, until: float = float("inf"), watch: Callable[[], object] = lambda: None) -> None:
        """Call actions until none is left, or until ``until`` seconds after the start; call ``watch`` after each."""
        while self._queue and self._queue[0][0] <= self.start + until:
            self.step()
            watch()

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
        return self._jobs[job].iteration

    # the commands of the core

    def _execute(self, command: Command) -> None:
        match command:
            case StoreJob(record, items):
                self.records[record.job] = record
                self.histories.setdefault(record.job, []).extend(items)
            case StorePolicy(record):
                self.policy_record = record
            case WriteAllocation(allocation):
                self.allocations.append(allocation)
                self._allocate(self._jobs[allocation.job], allocation)
            case AssignJobs(host, _, jobs):
                self.assigned[host] = jobs
            case StopWorkers(job=job, host=host, workers=workers):
                for number in workers:
                    self.later(EXIT_SECONDS, lambda n=number: self._stop(job, host, n))  # type: ignore[misc]
            case RemoveJob():
                self._remove(command)
            case PauseWorkers(job=job):
                self._jobs[job].is_pausing = True
            case ProbeHost(host, incarnation, beat, seconds):
                self._beat(host)
                unanswered = ProbeExpired(host, incarnation, beat)
                self.later(seconds, lambda: self.handle(unanswered))

    def _remove(self, command: RemoveJob) -> None:
        job = command.job
        self.removals.append(command)
        self._last_number = max(self._last_number, number_of(job))
        for stored in (self.records, self.histories, self._jobs):
            stored.pop(job)
        self.allocations = [allocation for allocation in self.allocations if allocation.job != job]
        self.later(0.0, lambda: self.handle(JobRemoved(job)))

    def _submit(self, submission: Submission) -> None:
        self._jobs[submission.job] = SimulatedJob(submission)
        self.handle(JobSubmitted(f"submit {submission.job}", submission.spec, job=submission.job))

    def _allocate(self, job: SimulatedJob, allocation: Allocation) -> None:
        """Act as the agents: start the workers that are new, pass the order to all."""
        before = {placement.worker for placement in job.allocation.placements} if job.allocation else set()
        is_new_life = allocation.cold_start and before.isdisjoint(
            placement.worker for placement in allocation.placements
        )
        if is_new_life or not allocation.placements:
            job.members, job.orders, job.is_pausing = (), [], False
            job.life += 1
            job.iteration = job.checkpoint if allocation.resume else 0
            job.lineage = allocation.lineage
            job.is_complete = False
        job.allocation = allocation
        for placement in allocation.placements:
            if placement.worker not in job.started:
                job.started.add(placement.worker)
                self._check_is_free(placement.host, placement.slot)
                job.workers[placement.worker] = SimulatedWorker(placement.host, placement.slot)
                self.later(FORK_SECONDS, lambda n=placement.worker: self._on_listening(job, n))  # type: ignore[misc]
        if allocation.is_recovery:
            self._recover(job, allocation)
        elif allocation.placements and allocation.has_addresses:
            job.orders.append(allocation)
            self._cold_start(job)

    def _check_is_free(self, host: str, slot: int) -> None:
        running = [w for job in self._jobs.values() for w in job.workers.values()]
        assert not any((w.host, w.slot) == (host, slot) for w in running), f"{host}/{slot} is held by two workers"

    def _recover(self, job: SimulatedJob, order: Allocation) -> None:
        """Leave the round that cannot end; train again if all workers that the order names are alive."""
        named = tuple(placement.worker for placement in order.placements)
        if job.is_complete or order.generation <= job.generation:
            return
        if set(named) & set(job.members):
            job.life += 1
            job.orders = []
        if set(named) <= set(job.members) & job.workers.keys():
            self._switch(job, order, leave=False)
            self._train(job)
        else:
            self._accuse(job, job.life)

    def _accuse(self, job: SimulatedJob, life: int) -> None:
        """Let members that wait for one that is gone report it, again and again as long as they wait."""
        alive = [number for number in job.members if number in job.workers]
        if life != job.life or job.is_complete or not job.missing or not alive:
            return
        suspected = PeerSuspected(suspect=job.missing[0], evidence="broken link", reason="")
        for number in alive:
            if number in job.workers:
                self._report(job, number, suspected)
        self.later(1.0, lambda: self._accuse(job, life))

    # what workers do

    def _on_listening(self, job: SimulatedJob, number: int) -> None:
        if worker := job.workers.get(number):
            worker.address = Address(host="10.0.0.1", port=1000 + number)
            self.later(SCRIPT_SECONDS, lambda: self._on_ready(job, number))
            self._beat(worker.host)

    def _on_ready(self, job: SimulatedJob, number: int) -> None:
        worker = job.workers.get(number)
        if worker is None:
            return
        worker.state = "ready"
        self._report(job, number, job.submission.ready())
        self._cold_start(job)

    def _cold_start(self, job: SimulatedJob) -> None:
        if not job.members and (order := job.newest_formed()) and order.cold_start:
            self._switch(job, order)
            self._train(job)

    def _switch(self, job: SimulatedJob, order: Allocation, *, leave: bool = True) -> None:
        leavers = set(job.members) - {p.worker for p in order.placements}
        job.members = tuple(p.worker for p in order.placements)
        job.trained |= set(job.members)
        job.generation = order.generation
        job.orders = [newer for newer in job.orders if newer.generation > order.generation]
        for number in job.members:
            job.workers[number].state = "member"
            job.workers[number].generation = order.generation
        self._report(job, job.members[0], Switched(workers=job.members, iteration=job.iteration))
        for number in sorted(leavers) if leave else ():
            job.workers[number].state = "left"
            self.later(EXIT_SECONDS, lambda n=number: self._exit(job, n, "left"))  # type: ignore[misc]

    def _train(self, job: SimulatedJob) -> None:
        """One iteration, and then the boundary."""
        submission, life = job.submission, job.life
        shards = -(-submission.num_shards // len(job.members))
        self.later(shards * submission.shard_seconds, lambda: self._boundary(job, life))

    def _boundary(self, job: SimulatedJob, life: int) -> None:
        if life != job.life or not job.members:
            return
        if job.missing:
            self._accuse(job, life)
            return
        job.iteration += 1
        every = job.submission.checkpoint_every
        if job.iteration >= job.submission.iterations:
            self._complete(job)
        elif job.is_pausing:
            job.checkpoint = job.iteration
            self._report_checkpoint(job, pausing=True)
        else:
            if every and job.iteration % every == 0:
                job.checkpoint = job.iteration
                self._report_checkpoint(job)
            if order := job.newest_formed():
                self._switch(job, order)
            self._train(job)

    def _report_checkpoint(self, job: SimulatedJob, *, pausing: bool = False) -> None:
        saved = CheckpointSaved(lineage=job.lineage, iteration=job.iteration, num_bytes=1, pausing=pausing)
        self._report(job, job.members[0], saved)

    def _complete(self, job: SimulatedJob) -> None:
        members, job.is_complete = job.members, True
        completed = Completed(
            iteration=job.iteration,
            epoch=0,
            samples_seen=0,
            loss=None,
            metrics={},
            validation={},
            params_sha256="0" * 64,
            model=None,
            ledger=(),
            bits="same bits",
        )
        self._report(job, members[0], completed)
        for number in members:
            self.later(EXIT_SECONDS, lambda n=number: self._exit(job, n, "finished"))  # type: ignore[misc]

    def _stop(self, name: str, host: str, number: int) -> None:
        job = self._jobs.get(name)
        if job is None:
            return
        if number in job.workers:
            self._exit(job, number, "exited")
        else:
            gone = WorkerReport(job=name, worker=number, slot=0, state="gone", exit=WorkerExit(kind="not started"))
            self._beat(host, gone)

    def _exit(self, job: SimulatedJob, number: int, kind: str) -> None:
        worker = job.workers.pop(number, None)
        if worker is None:
            return
        exit_ = WorkerExit.model_validate({"kind": kind, "status": -signal.SIGKILL if kind == "killed" else 0})
        gone = WorkerReport(job=job.submission.job, worker=number, slot=worker.slot, state="gone", exit=exit_)
        job.gone[number] = (worker.host, gone, self.now)
        self._beat(worker.host, gone)

    # what agents and workers report

    def _beat(self, host: str, *gone: WorkerReport) -> None:
        if host in self._silent:
            return
        self._beats += 1
        workers = [
            WorkerReport.model_validate(
                {
                    "job": name,
                    "worker": number,
                    "slot": worker.slot,
                    "state": worker.state,
                    "address": worker.address,
                    "generation": worker.generation,
                    "iteration": job.iteration,
                }
            )
            for name, job in self._jobs.items()
            for number, worker in job.workers.items()
            if worker.host == host
        ]
        lasting = [
            report
            for job in self._jobs.values()
            for number, (at_host, report, ended) in job.gone.items()
            if at_host == host and job.allocation and report not in gone
            if self.now - ended < LISTED_SECONDS
            or any(placement.worker == number for placement in job.allocation.placements)
        ]
        gone = (*gone, *lasting)
        record = self.hosts[host]
        beat = Heartbeat(
            host=host,
            incarnation=record.incarnation,
            number=self._beats,
            jobs=self.assigned.get(host),
            workers=(*workers, *gone),
        )
        self._send(beat)

    def _report(self, job: SimulatedJob, number: int, content: Content) -> None:
        worker = job.workers[number]
        report = Report(
            job=job.submission.job,
            host=worker.host,
            incarnation=self.hosts[worker.host].incarnation,
            worker=number,
            slot=worker.slot,
            generation=job.generation,
            time=at(self.now),
            content=content,
        )
        self._send(report)

    def _send(self, event: Event) -> None:
        for arriving in self.channel(event):
            self.handle(arriving)

    def send_heartbeats(self) -> None:
        """Let every host send a heartbeat now, and the core check its deadlines."""
        for name, record in self.hosts.items():
            if record.state in (HostState.UP, HostState.DRAINING):
                self._beat(name)
        self.handle(Tick())
