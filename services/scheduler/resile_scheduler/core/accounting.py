"""How many slots jobs and tenants hold and have held, since when, and who has been waiting for how long.

- The record of a job says what it has used. It changes in the same write as what changed the number of its slots, so a
  new scheduler goes on from there. Workers that outlive their job's end are not counted.
- What a job has used is added to the removed usage of its tenant before its record is removed. That names the jobs
  whose records may still exist, so that none is counted twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from resile_shared.messages.jobs import JobState
from resile_shared.messages.message import at
from resile_shared.messages.pool import MAX_TENANTS
from resile_shared.messages.usage import MAX_COUNTED, RemovedUsage, add, hold, hour_of, used_since

from ..policies.ranking import PATIENCE_SECONDS
from .events import StoreUsage
from .state.job import Job
from .state.pool import Pool

RECENT_SECONDS = 86400.0
"""What a tenant has used in the past this many seconds counts against it when tenants wait."""
REFRESH_SECONDS = 60.0
OTHERS = "other-tenants"
"""The name under which the removed usage of tenants beyond `MAX_TENANTS` is added up."""


@dataclass
class _Unreported:
    """Workers that held slots of a job under an earlier scheduler, and that no host has reported to this one yet."""

    num: int
    known: set[int]
    """Workers of the earlier scheduler that this one knows."""
    next_worker: int
    """Workers from this number on are this scheduler's own."""

    def see(self, workers: Iterable[int]) -> None:
        """Subtract the workers that a host has reported."""
        reported = {number for number in workers if number < self.next_worker} - self.known
        self.known |= reported
        self.num = max(0, self.num - len(reported))


class Accounting:
    """Counts what is used."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._removed: dict[str, RemovedUsage] = {}
        self._counted: dict[str, str] = {}
        """Jobs that the removed usage includes, each with the tenant under which it is counted."""
        self._changed: dict[str, None] = {}
        self._due: set[str] = set()
        """Jobs that have waited so long that a decision was requested."""
        self.recent: dict[str, float] = {}
        """The slot-seconds that the jobs of each tenant have held in the last day, as of the last minute."""
        self._refreshed = float("-inf")
        self._unreported: dict[str, _Unreported] = {}
        """Unreported workers by job; they hold their slots until all hosts have reported which workers they have."""

    def restore(self, removed: Iterable[RemovedUsage]) -> None:
        """Take over what is stored."""
        for usage in removed:
            self._removed[usage.tenant] = usage
            self._counted.update(dict.fromkeys(usage.jobs, usage.tenant))
        for name in [name for name in self._counted if name not in self._pool.jobs]:
            self.on_removed(name)
        for job in self._pool.jobs.values():
            num = job.record.usage.slots - len(job.workers)
            if num > 0:
                self._unreported[job.id] = _Unreported(num, set(job.workers), job.record.next_worker)

    def count(self, jobs: Iterable[Job], *, now: float) -> None:
        """Count what has changed with these jobs."""
        for job in jobs:
            slots = 0 if job.is_over else len(job.workers) + self._num_unreported(job)
            if slots != job.record.usage.slots:
                job.update(usage=hold(job.record.usage, slots, now=at(now)))
            holds = bool(slots and job.held)
            waits = not holds and job.record.state is JobState.QUEUED
            if holds is not (job.record.holding_since is not None):
                since = at(held_since(job, now=now)) if holds else None
                job.update(holding_since=since, was_due=holds and was_due(job, now=now))
            if waits is not (job.record.waiting_since is not None):
                job.update(waiting_since=at(now) if waits else None)
            if job.record.is_deleted and job.id not in self._counted:
                self._add_removed(job)

    def check(self, *, now: float) -> None:
        """Request a decision when a job becomes due."""
        if now - self._refreshed >= REFRESH_SECONDS:
            self._refresh(now)
        for job in self._pool.jobs.values():
            if due_since(job) > now:
                self._due.discard(job.id)
            elif job.id not in self._due:
                self._due.add(job.id)
                self._pool.changed(job, f"{job.id} has waited for {PATIENCE_SECONDS / 60:g} minutes")

    def on_hosts_changed(self) -> None:
        """Stop counting unreported workers once all hosts have reported which workers they have."""
        if self._unreported and not any(host.is_alive and not host.is_heard for host in self._pool.hosts.values()):
            for name in self._unreported.keys() & self._pool.jobs.keys():
                self._pool.touch(self._pool.jobs[name])
            self._unreported.clear()

    def is_counted(self, job: str) -> bool:
        """Whether the removed usage of its tenant includes what this job has used."""
        return job in self._counted

    def on_removed(self, job: str) -> None:
        """Forget a job for which nothing is stored any more."""
        self._due.discard(job)
        tenant = self._counted.pop(job, None)
        if tenant is not None:
            removed = self._removed[tenant]
            self._store(removed.model_copy(update={"jobs": tuple(name for name in removed.jobs if name != job)}))
        for other in self._pool.jobs.values():
            if other.record.is_deleted and other.id not in self._counted:
                self._add_removed(other)

    def take_changes(self) -> list[StoreUsage]:
        """Return the changes that are not stored yet; each is returned once."""
        changed, self._changed = self._changed, {}
        return [StoreUsage(self._removed[tenant]) for tenant in changed]

    def _num_unreported(self, job: Job) -> int:
        if job.id not in self._unreported:
            return 0
        unreported = self._unreported[job.id]
        unreported.see(job.workers)
        return unreported.num

    def _refresh(self, now: float) -> None:
        """Recompute what tenants have used recently, if there are several."""
        self._refreshed = now
        if len({job.record.spec.tenant for job in self._pool.jobs.values() if not job.is_over}) < 2:
            return
        end, begin = at(now), hour_of(at(max(0.0, now - RECENT_SECONDS)))
        used = [(name, removed.used) for name, removed in self._removed.items()]
        jobs = (job.record for job in self._pool.jobs.values() if job.id not in self._counted)
        self.recent.clear()
        for tenant, usage in (*used, *((record.spec.tenant, record.usage) for record in jobs)):
            self.recent[tenant] = self.recent.get(tenant, 0.0) + used_since(usage, begin, now=end) / 1000

    def _add_removed(self, job: Job) -> None:
        tenant = job.record.spec.tenant
        if tenant not in self._removed and len(self._removed) >= MAX_TENANTS:
            tenant = OTHERS
        removed = self._removed.get(tenant, RemovedUsage(tenant=tenant))
        if len(removed.jobs) < MAX_COUNTED:  # the others follow when these are removed
            self._counted[job.id] = tenant
            used = add(removed.used, job.record.usage)
            self._store(removed.model_copy(update={"used": used, "jobs": (*removed.jobs, job.id)}))

    def _store(self, removed: RemovedUsage) -> None:
        self._removed[removed.tenant] = removed
        self._changed[removed.tenant] = None


def held_since(job: Job, *, now: float) -> float:
    """Return since when a job has had a claim to the slots that it holds: since it got them, or was due before.

    Otherwise the next job that is due would rank before it, and all jobs that are due would take turns.
    """
    since = job.record.holding_since
    return since.timestamp() if since else min(at(now).timestamp(), due_since(job))


def attained(job: Job, *, now: float) -> float:
    """Return the slot-seconds that a job has held so far, with those of its present slots that are not counted yet.

    A job that has never trained has held 0: a start that was cancelled, or that a crash of the scheduler undid, costs
    it no turn.
    """
    if not job.record.generation:
        return 0.0
    usage = job.record.usage
    held = max(now - usage.since.timestamp(), 0.0) if usage.since else 0.0
    return usage.slot_milliseconds / 1000 + usage.slots * held


def was_due(job: Job, *, now: float) -> bool:
    """Return whether a job that holds slots was due when it got them."""
    return job.record.was_due if job.record.holding_since else due_since(job) <= now


def due_since(job: Job) -> float:
    """Return when the job has waited long enough to be due; infinite if it is not waiting."""
    since = job.record.waiting_since
    return since.timestamp() + PATIENCE_SECONDS if since else inf
