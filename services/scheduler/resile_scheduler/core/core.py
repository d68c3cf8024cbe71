"""Who gets which slots: the one door of the scheduler's core.

Events go in through `Scheduler.handle`, commands come out. What is known lies in `state.py`; what people ask is carried
out in `people.py`, what agents and workers tell in `workers.py`. When either has changed something, the core decides
anew, always in the same way:

1. `policies`: how many workers should each job have?
2. `placement`: on which slots?
3. `generations`: what can be done towards that now? A slot of another job is free, and so ordered for this one, only
   once its worker's release was seen.

The commands follow from comparing what is known with what was stored: records first, then answers, then allocations.
"""

from collections.abc import Iterable, Mapping

from resile_shared.messages.allocations import Allocation
from resile_shared.messages.hosts import Heartbeat, HostRecord
from resile_shared.messages.jobs import JobState
from resile_shared.messages.reports import Report
from resile_shared.recent_events import RecentEvents

from .events import (
    Command,
    Event,
    JobChangeRequested,
    JobSubmitted,
    PauseWorkers,
    PolicyChanged,
    ProbeExpired,
    Reply,
    StateRestored,
    StopWorkers,
    StoreJob,
    Tick,
    WriteAllocation,
)
from .generations import Generations, next_change
from .job_commands import JobCommands
from .lifecycle import Step
from .placement import SlotId, Want, place
from .policies import Demand, Policy, Target, fairshare
from .recovery import Recovery
from .state import Intent, Job, Phase, Pool, Worker
from .suspicions import SuspicionTracker
from .workers import Workers

PAUSE_AGAIN_SECONDS = 5.0


class Scheduler:
    """The state of the pool and all decisions about it. What it knows can be read; only `handle` changes it.

    ``epoch`` is that of its lease; the secrets of generations are derived from ``secret``; ``detection_seconds`` is the
    silence after which a pool holds somebody to be lost.
    """

    def __init__(
        self, *, epoch: int = 1, secret: str = "", policy: Policy = fairshare, detection_seconds: float = 3.0
    ) -> None:
        self._recent = RecentEvents("scheduler")
        self.pool = Pool()
        self.policy: Policy = policy
        self._epoch = epoch
        self._explanations: dict[str, str] = {}
        """Why each job has what it has, or what it is waiting for, as of the newest decision."""
        self._groups: dict[tuple[str, str], frozenset[SlotId]] = {}
        """The usable slots of a class of device that fit a job's group, as of one decision."""
        self._generations = Generations(self.pool, epoch=epoch, secret=secret)
        self._job_commands = JobCommands(self.pool, self._generations)
        self._recovery = Recovery(self.pool, self._generations)
        self._suspicions = SuspicionTracker(self.pool, detection_seconds=detection_seconds)
        self._workers = Workers(
            self.pool,
            self._generations,
            self._job_commands,
            self._recovery,
            self._suspicions,
            detection_seconds=detection_seconds,
        )

    def handle(self, event: Event, *, now: float) -> list[Command]:
        """Take ``event`` in at ``now`` (seconds since the epoch); return what is to be done about it, in order."""
        with self._recent.handling(event):
            return self._handle(event, now)

    def explain(self) -> dict[str, str]:
        """Return why each job that shares slots has what it has, or what it is waiting for."""
        return dict(self._explanations)

    def _handle(self, event: Event, now: float) -> list[Command]:
        replies: list[Command] = []
        match event:
            case JobSubmitted():
                replies = [Reply(event.command, self._job_commands.submit(event, now=now))]
            case JobChangeRequested():
                replies = [Reply(event.command, self._job_commands.ask(event, now=now))]
            case HostRecord() | Heartbeat() | Report() | Tick():
                self._workers.handle(event, now=now)
            case ProbeExpired():
                self._suspicions.unanswered(event, now=now)
            case PolicyChanged(policy, cause):
                self.policy = policy
                self.pool.changed(cause)
            case StateRestored():
                self._restore(event, now)
        jobs = self._concerned(event)
        while self.pool.has_changed:  # a decision can free what the next one uses
            self._decide(now)
        stored = [*_records(jobs), *replies, *_allocations(jobs)]
        return [*stored, *self._stops(event, jobs), *_pauses(jobs, now), *self._suspicions.take_probes()]

    def _concerned(self, event: Event) -> list[Job]:
        """Return the jobs for which something may have to be done: a heartbeat with no change_reason must be cheap."""
        if self.pool.has_changed or not isinstance(event, Heartbeat | Report):
            return list(self.pool.jobs.values())
        names = [event.job] if isinstance(event, Report) else {report.job: None for report in event.workers}
        return [self.pool.jobs[name] for name in names if name in self.pool.jobs]

    # the decision

    def _decide(self, now: float) -> None:
        cause, causer = self.pool.cause, self.pool.causer
        self.pool.cause, self.pool.causer, self.pool.has_changed = "", "", False
        self._groups.clear()
        self._explanations.clear()
        for job in self.pool.jobs.values():
            self._recovery.answer(job, now=now)
            self.pool.release(job)
            if job.record.state is JobState.ACCEPTED:
                job.enter(Step.ENQUEUE)
        if all(job.is_over for job in self.pool.jobs.values()):
            return
        for device_class, jobs in self._sections().items():
            self._share(
                device_class, jobs, now, {} if not cause else {job.id: cause for job in jobs if job.id != causer}
            )

    def _sections(self) -> dict[str, list[Job]]:
        """Part the jobs by class of device: a job runs on one class, and keeps to that on which it has workers."""
        slots: dict[str, int] = {}
        for host in self.pool.hosts.values():
            if host.is_usable:
                slots[host.record.device_class] = slots.get(host.record.device_class, 0) + len(host.record.slots)
        sections: dict[str, list[Job]] = {}
        waiting: list[Job] = []
        for job in self.pool.jobs.values():
            if job.is_over:
                continue
            if job.placements:
                sections.setdefault(self._class_of(job), []).append(job)
            else:
                waiting.append(job)
        for job in waiting:
            best = max(
                sorted(slots), key=lambda c: self._num_fitting(job, c) / (1 + len(sections.get(c, ()))), default=""
            )
            sections.setdefault(best, []).append(job)
        return sections

    def _class_of(self, job: Job) -> str:
        return self.pool.hosts[job.placements[0].host].record.device_class

    def _num_fitting(self, job: Job, device_class: str) -> int:
        return len(self._eligible(job, device_class, now=float("inf")))

    def _eligible(self, job: Job, device_class: str, *, now: float) -> frozenset[SlotId]:
        """Return the slots on which the job may start workers, or will when they are free."""
        group = (device_class, job.record.spec.group)
        if group not in self._groups:
            self._groups[group] = frozenset(self._slots_of(*group))
        fitting = self._groups[group]
        backoffs = {name for name, back_off in job.backoffs.items() if back_off.until > now}
        allowed = frozenset(slot for slot in fitting if slot.host not in backoffs) if backoffs else fitting
        # A job without workers, or whose number of workers is exact, is never left without any host.
        return allowed or (fitting if job.is_exact or not job.has_started else allowed)

    def _slots_of(self, device_class: str, group: str) -> Iterable[SlotId]:
        for host in self.pool.hosts.values():
            if host.is_usable and host.record.device_class == device_class and host.fits(group):
                yield from host.slots

    def _share(self, device_class: str, jobs: list[Job], now: float, causes: Mapping[str, str]) -> None:
        usable = {
            slot
            for host in self.pool.hosts.values()
            if host.is_usable and host.record.device_class == device_class
            for slot in host.slots
        }
        eligible = {job.id: self._eligible(job, device_class, now=now) for job in jobs}
        training = [job for job in jobs if job.is_training]
        targets = self.policy([self._demand(job, usable, eligible[job.id]) for job in training], len(usable))
        wants = [self._want(job, targets.get(job.id), eligible[job.id]) for job in jobs]
        placed = place(wants, usable=usable, free=[slot for slot in usable if self.pool.is_free(slot)])
        for job in training:
            self._pursue(job, targets[job.id], placed[job.id], causes.get(job.id, ""), now)

    def _demand(self, job: Job, usable: Iterable[SlotId], eligible: frozenset[SlotId]) -> Demand:
        ready = job.record.ready
        held = set(job.held.values())
        most = min(job.record.spec.max_workers, len(eligible | held.intersection(usable)))
        if ready is not None:
            most = min(most, ready.num_shards)
        return Demand(
            job=job.id,
            number=job.number,
            priority=job.record.priority,
            least=job.least_workers,
            most=most,
            num_shards=ready.num_shards if ready else None,
            holds_slots=bool(held),
            iteration=job.iteration,
            batch_size=ready.batch_size if ready else 0,
            iterations_total=ready.iterations_total if ready else None,
            active_workers=len(job.active) if job.has_started else 0,
            active_since=job.active_since,
        )

    def _want(self, job: Job, target: Target | None, eligible: frozenset[SlotId]) -> Want:
        """Return what the job should have; one that takes no part in the sharing keeps what it has."""
        slots = job.held
        return Want(
            job=job.id,
            workers=target.workers if target else len(slots),
            held=tuple(slots.values()),
            joining=frozenset(slots[worker] for worker in job.joiners & slots.keys()),
            eligible=eligible,
        )

    def _pursue(self, job: Job, target: Target, wanted: tuple[SlotId, ...], cause: str, now: float) -> None:
        """Do now what can be done towards ``wanted``."""
        if target.error:
            self._recovery.fail(job, target.error, now=now)
            return
        job.is_exact = target.is_exact
        if target.workers != job.target or target.is_exact:
            job.target = target.workers
            job.cause = target.reason if target.is_exact else cause or target.reason
        if not target.workers and job.has_started:
            job.intend(Intent.SUSPEND, target.reason, now=now)
            return
        change = next_change(job, target, wanted, pool=self.pool)
        if change is not None:
            self._generations.carry_out(job, change, now=now)
        self._generations.give_order(job)
        job.change_reason = ""
        self._explain(job, target, now)

    def _explain(self, job: Job, target: Target, now: float) -> None:
        reason = target.reason
        if job.record.state is JobState.QUEUED:
            reason = reason if not target.workers else "waiting for slots that other jobs release"
            if next(item.kind for item in reversed(job.record.history) if item.kind != "priority") != "queued":
                job.note("queued", reason, now=now)
        self._explanations[job.id] = reason

    def _stops(self, event: Event, jobs: Iterable[Job]) -> list[Command]:
        """Tell agents whom nobody needs: once, and again with each heartbeat that does not say they are gone."""
        held: dict[str, list[Worker]] = {job.id: list(job.workers.values()) for job in jobs}
        heard = None
        if isinstance(event, Heartbeat) and event.host in self.pool.hosts:
            heard = event.host
            for job, worker in self.pool.held_on(heard):
                held.setdefault(job.id, []).append(worker)
        stops: dict[tuple[str, str, int], list[int]] = {}
        for name, workers in held.items():
            for worker in self.pool.jobs[name].unneeded(workers):
                if not worker.is_stopped or worker.slot.host == heard:
                    worker.is_stopped = True
                    stops.setdefault((name, worker.slot.host, worker.incarnation), []).append(worker.number)
        return [StopWorkers(*key, workers=tuple(sorted(set(numbers)))) for key, numbers in sorted(stops.items())]

    # an earlier life

    def _restore(self, event: StateRestored, now: float) -> None:
        """Take up what an earlier scheduler stored. Its workers are presumed alive until their hosts are lost."""
        for record in sorted(event.jobs, key=lambda r: (r.submitted, r.job)):
            job = Job(record, number=len(self.pool.jobs), cause="the scheduler started anew")
            job.iteration = max((item.iteration for item in record.history), default=0)
            job.active_since = next((i.iteration for i in reversed(record.history) if i.kind == "allocation"), 0)
            self.pool.jobs[job.id] = job
            self.pool.applied_commands.update(dict.fromkeys(record.applied_commands, job.id))
        for host in event.hosts:
            self._workers.host_changed(host, now=now, is_live=False)
        for allocation in event.allocations:
            if allocation.job in self.pool.jobs:
                self._restore_allocation(self.pool.jobs[allocation.job], allocation, now)
        for job in self.pool.jobs.values():
            self._reconcile(job)
            self._workers.compare(job, now=now)
        self.pool.cause = ""
        self.pool.changed()

    def _restore_allocation(self, job: Job, allocation: Allocation, now: float) -> None:
        job.allocation = allocation.model_copy(update={"epoch": self._epoch})
        job.target = len(allocation.placements)
        is_in_force = allocation.generation <= job.record.generation
        if job.has_started and not is_in_force:
            shown = (item.slots for item in reversed(job.record.history) if item.kind == "allocation")
            job.unreconciled_slots = frozenset(next(shown, ()))
        # A slot of the generation in force is given to nobody new, so who is on one is a member.
        job.active = tuple(p for p in allocation.placements if is_in_force or p.slot_name in job.unreconciled_slots)
        job.active_until = allocation.until if is_in_force else None
        if allocation.has_addresses and allocation.placements:
            job.orders[allocation.generation] = job.allocation
        for placement in allocation.placements:
            worker = Worker(
                placement.worker,
                SlotId(placement.host, placement.slot),
                placement.incarnation,
                now,
                phase=Phase.MEMBER if placement in job.active else Phase.STARTING,
                address=placement.address,
                was_seen=placement.address is not None,
            )
            self.pool.add_worker(job, worker)

    def _reconcile(self, job: Job) -> None:
        """Put right what a crash between the storing of a record and of its allocation left."""
        state = job.record.state
        if state in (JobState.QUEUED, JobState.ACCEPTED, JobState.PAUSED) or job.is_over:
            self._generations.abandon(job, state.value)
        elif not job.placements:
            job.enter(Step.REQUEUE)
        else:
            job.recall_intent()
            if state in (JobState.RESCALING, JobState.RECOVERING) and not job.is_settling:
                job.enter(Step.SETTLE)


def _records(jobs: Iterable[Job]) -> list[Command]:
    commands: list[Command] = []
    for job in jobs:
        if job.record is not job.stored:
            job.stored = job.record
            commands.append(StoreJob(job.record))
    return commands


def _allocations(jobs: Iterable[Job]) -> list[Command]:
    commands: list[Command] = []
    for job in jobs:
        if job.allocation is not None and job.allocation is not job.written:
            job.written = job.allocation
            commands.append(WriteAllocation(job.allocation))
    return commands


def _pauses(jobs: Iterable[Job], now: float) -> list[Command]:
    commands: list[Command] = []
    for job in jobs:
        is_due = not job.is_over and job.intent is not Intent.TRAIN and job.has_started
        if is_due and now - job.pause_sent >= PAUSE_AGAIN_SECONDS:
            job.pause_sent = now
            hosts = sorted({worker.slot.host for worker in job.workers.values()})
            commands.append(PauseWorkers(job.id, job.record.generation, tuple(hosts)))
    return commands
