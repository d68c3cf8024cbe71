"""Decides which slots each job should have, and takes the next steps towards that.

1. `resile_scheduler.policies`: how many workers should each job have?
2. `placement`: on which slots?
3. `allocator`: what can be done towards that now? A slot of another job is free, and so ordered for this one, only once
   the release of its worker was seen.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from resile_shared.messages.jobs import Intent, JobState

from ..policies.demand import Demand, Policy, Target
from ..policies.no_slots import no_slots
from .allocator import Allocator, next_change
from .job import Job
from .lifecycle import Step
from .placement import SlotId, Want, place
from .pool import Pool
from .recovery import Recovery


class Decisions:
    """Shares the slots of the pool. ``explanations`` says why each job has what it has, or what it is waiting for."""

    def __init__(self, pool: Pool, allocator: Allocator, recovery: Recovery, *, policy: Policy) -> None:
        self._pool = pool
        self._allocator = allocator
        self._recovery = recovery
        self._policy = policy
        self._is_suspended = False
        self.explanations: dict[str, str] = {}
        self._groups: dict[tuple[str, str], frozenset[str]] = {}
        """The usable hosts of a class of device that fit a job's group, as of one decision."""
        self._num_slots: dict[frozenset[str], int] = {}
        """How many slots such hosts have."""

    def change_policy(self, policy: Policy, cause: str) -> None:
        """Use ``policy`` from now on; ``cause`` is the reason in the histories."""
        self._policy = policy
        self._pool.changed(cause)

    def suspend(self) -> None:
        """Give no job a slot from now on, whatever the policy."""
        if not self._is_suspended:
            self._is_suspended = True
            self._pool.changed()

    def decide(self, *, now: float) -> None:
        """Decide until nothing changes: a decision can free what the next one uses."""
        while self._pool.has_changed:
            self._decide(now)

    def _decide(self, now: float) -> None:
        cause, causer = self._pool.take_change()
        self._groups.clear()
        self._num_slots.clear()
        self.explanations.clear()
        for job in self._pool.jobs.values():
            self._recovery.answer(job, now=now)
            self._pool.release(job)
            if job.record.state is JobState.ACCEPTED:
                job.enter(Step.ENQUEUE)
        if all(job.is_over for job in self._pool.jobs.values()):
            return
        for device_class, jobs in self._by_device_class().items():
            self._share(
                device_class, jobs, now, {} if not cause else {job.id: cause for job in jobs if job.id != causer}
            )

    def _by_device_class(self) -> dict[str, list[Job]]:
        """Group the jobs by class of device: a job stays on the class on which it has workers, or has trained."""
        slots: dict[str, int] = {}
        for host in self._pool.hosts.values():
            if host.is_usable:
                slots[host.record.device_class] = slots.get(host.record.device_class, 0) + len(host.record.slots)
        groups: dict[str, list[Job]] = {}
        waiting: list[Job] = []
        for job in self._pool.jobs.values():
            if job.is_over:
                continue
            if job.generations.placements:
                groups.setdefault(self._class_of(job), []).append(job)
            elif job.record.device_class:
                groups.setdefault(job.record.device_class, []).append(job)
            else:
                waiting.append(job)
        for job in waiting:
            best = max(
                sorted(slots), key=lambda c: self._num_fitting(job, c) / (1 + len(groups.get(c, ()))), default=""
            )
            groups.setdefault(best, []).append(job)
        return groups

    def _class_of(self, job: Job) -> str:
        return self._pool.hosts[job.generations.placements[0].host].record.device_class

    def _num_fitting(self, job: Job, device_class: str) -> int:
        return self._num_slots_of(self._eligible(job, device_class, now=float("inf")))

    def _eligible(self, job: Job, device_class: str, *, now: float) -> frozenset[str]:
        """Return the hosts on which the job may start workers, or will when slots are free."""
        group = (device_class, job.record.spec.group)
        if group not in self._groups:
            self._groups[group] = frozenset(self._hosts_of(*group))
        fitting = self._groups[group]
        avoided = job.backoff.avoided(now=now)
        allowed = fitting - avoided if avoided else fitting
        # A job without workers, or whose number of workers is exact, is never left without any host.
        return allowed or (fitting if job.target.is_exact or not job.generations.has_started else allowed)

    def _hosts_of(self, device_class: str, group: str) -> Iterable[str]:
        for name, host in self._pool.hosts.items():
            if host.is_usable and host.record.device_class == device_class and host.fits(group):
                yield name

    def _num_slots_of(self, hosts: frozenset[str]) -> int:
        if hosts not in self._num_slots:
            self._num_slots[hosts] = sum(len(self._pool.hosts[host].slots) for host in hosts)
        return self._num_slots[hosts]

    def _share(self, device_class: str, jobs: list[Job], now: float, causes: Mapping[str, str]) -> None:
        usable = {
            slot
            for host in self._pool.hosts.values()
            if host.is_usable and host.record.device_class == device_class
            for slot in host.slots
        }
        eligible = {job.id: self._eligible(job, device_class, now=now) for job in jobs}
        training = [job for job in jobs if job.is_training and not self._must_wait(job, now)]
        policy = no_slots if self._is_suspended else self._policy
        targets = policy([self._demand(job, usable, eligible[job.id]) for job in training], len(usable))
        wants = [self._want(job, targets.get(job.id), eligible[job.id]) for job in jobs]
        free = self._pool.free_slots()
        placed = place(wants, usable=usable, free=free)
        missing = "" if usable else self._missing(device_class)
        for job in training:
            target = targets[job.id]
            if missing and job.record.device_class:
                target = replace(target, reason=missing)
            self._approach(job, target, placed[job.id], free, causes.get(job.id, ""), now=now)

    def _missing(self, device_class: str) -> str:
        """Say that jobs wait for a host of ``device_class``, if the pool has others; else nothing."""
        if not any(host.is_usable for host in self._pool.hosts.values()):
            return ""
        return f"waiting for a host of the class on which it trained, {device_class}: another one gives other bits"

    def _must_wait(self, job: Job, now: float) -> bool:
        is_waiting = not job.generations.placements and job.start_backoff.is_waiting(now=now)
        if is_waiting:
            self.explanations[job.id] = "waiting a while: its last starts made no progress"
        return is_waiting

    def _demand(self, job: Job, usable: Container[SlotId], eligible: frozenset[str]) -> Demand:
        ready = job.record.ready
        held = set(job.held.values())
        elsewhere = sum(slot in usable and slot.host not in eligible for slot in held)
        most = min(job.record.spec.max_workers, self._num_slots_of(eligible) + elsewhere)
        if ready is not None:
            most = min(most, ready.num_shards)
        return Demand(
            job=job.id,
            number=job.number,
            tenant=job.record.spec.tenant,
            priority=job.record.priority,
            least=job.least_workers,
            most=most,
            num_shards=ready.num_shards if ready else None,
            holds_slots=bool(held),
            assigned_workers=job.num_assigned if held else 0,
            iteration=job.iteration,
            batch_size=ready.batch_size if ready else 0,
            iterations_total=ready.iterations_total if ready else None,
            active_workers=len(job.generations.active) if job.generations.has_started else 0,
            active_since=job.generations.active_since,
            sizes=job.sizes or None,
        )

    def _want(self, job: Job, target: Target | None, hosts: frozenset[str]) -> Want:
        """Return what the job should have; a job that shares no slots keeps what it has."""
        slots = job.held
        return Want(
            job=job.id,
            workers=target.workers if target else len(slots),
            held=tuple(slots.values()),
            joining=frozenset(slots[worker] for worker in job.joiners & slots.keys()),
            hosts=hosts,
        )

    def _approach(
        self, job: Job, target: Target, wanted: tuple[SlotId, ...], free: frozenset[SlotId], cause: str, *, now: float
    ) -> None:
        """Take the next step towards ``wanted``."""
        if target.error:
            self._recovery.fail(job, target.error, now=now)
            return
        job.set_target(target, cause, num_assigned=len(wanted))
        if not target.workers and job.generations.has_started:
            job.intend(Intent.SUSPEND, target.reason, now=now)
            return
        change = next_change(job, target, wanted, free=free, pool=self._pool)
        if change is not None:
            self._allocator.apply(job, change, now=now)
        self._allocator.give_order(job)
        job.explain_change("")
        self._explain(job, target, now)

    def _explain(self, job: Job, target: Target, now: float) -> None:
        reason = target.reason
        if job.record.state is JobState.QUEUED:
            reason = reason if not target.workers else "waiting for slots that other jobs release"
            if job.record.kind != "queued":
                job.note("queued", reason, now=now)
        self.explanations[job.id] = reason
