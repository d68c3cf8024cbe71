"""Which jobs are removed, with all that is stored of them: those that users delete, and the oldest that have ended.

What a job has made stays in storage unless somebody deletes the job. A job that is deleted is marked in its record
first, so that a new scheduler goes on with its removal. It is removed once no worker of it can be alive, which a new
scheduler knows when all hosts have sent a heartbeat, and forgotten once all that was stored of it is gone. Its number
is never used again. A host whose heartbeats cannot be handled holds its removal up only for a while: its agent ends the
workers of jobs that are over. A host is forgotten when its record is gone and no worker holds a slot of it.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from resile_shared.messages.message import at

from .events import RemoveJob
from .state.job import Job
from .state.pool import Pool

DAY_SECONDS = 86400.0
MAX_LEAVING = 100
"""While this many jobs are being removed, no more are deleted because of the limits: a lower limit may concern
thousands, and a decision takes milliseconds."""
OVER_SECONDS = 600.0
"""A job that has been over for this long has no workers on hosts whose heartbeats cannot be handled."""


@dataclass(frozen=True)
class Limits:
    """How many of the jobs that have ended are kept, and for how long."""

    jobs: int
    days: float


class Retention:
    """Decides which jobs are removed. Without ``limits``, only those that users delete."""

    def __init__(self, pool: Pool, limits: Limits | None) -> None:
        self._pool = pool
        self._limits = limits
        self._deleted: set[str] = set()
        """Jobs that are deleted and still have to be removed."""
        self._left_hosts: set[str] = set()
        """Hosts whose records are gone, but that are not forgotten yet."""
        self._ignored_hosts: frozenset[str] = frozenset()
        """Hosts with heartbeats that could not be handled."""

    def delete(self, job: Job, *, keeps_results: bool = False) -> None:
        """Mark a job that has ended as deleted."""
        job.update(is_deleted=True, keeps_results=keeps_results)
        self._deleted.add(job.id)
        self._pool.touch(job)

    def restore(self, jobs: Iterable[Job], *, ignored_hosts: frozenset[str]) -> None:
        """Continue the removals that an earlier scheduler began."""
        self._ignored_hosts = ignored_hosts
        self._deleted.update(job.id for job in jobs if job.record.is_deleted)

    def check(self, *, now: float) -> None:
        """Delete the jobs that are beyond the limits."""
        self._forget_hosts()
        if self._limits is None:
            return
        ended = [(job.record.ended, job.number, job) for job in self._pool.jobs.values() if job.record.ended]
        kept = sorted(entry for entry in ended if not entry[2].record.is_deleted)
        oldest = at(max(0.0, now - self._limits.days * DAY_SECONDS))
        num_beyond = len(kept) - self._limits.jobs
        num_leaving = len(ended) - len(kept)
        for position, (time, _, job) in enumerate(kept[: max(0, MAX_LEAVING - num_leaving)]):
            if position < num_beyond or time < oldest:
                self.delete(job, keeps_results=True)

    def removals(self, *, is_counted: Callable[[str], bool], now: float) -> list[RemoveJob]:
        """Return, once, the deleted jobs that can have no live worker, and whose usage is counted."""
        due = [name for name in self._workerless(now) if is_counted(name)] if self._deleted else []
        if not due:
            return []
        self._deleted.difference_update(due)
        staying = (job for job in self._pool.jobs.values() if not job.record.is_deleted or job.id in self._deleted)
        num_users = Counter(job.record.spec.package for job in staying)
        removals = []
        for record in (self._pool.jobs[name].record for name in reversed(due)):  # the last one removes the package
            package = record.spec.package
            is_used = num_users[package] > 0
            num_users[package] += 1
            removals.append(RemoveJob(record.job, package, is_used, record.keeps_results, record.checkpoint))
        return removals[::-1]

    def _workerless(self, now: float) -> list[str]:
        jobs = [self._pool.jobs[name] for name in sorted(self._deleted) if not self._pool.jobs[name].workers]
        unheard = {name for name, host in self._pool.hosts.items() if host.is_alive and not host.is_heard}
        if not unheard:
            return [job.id for job in jobs]
        latest = at(max(0.0, now - OVER_SECONDS))
        is_known = unheard <= self._ignored_hosts
        return [job.id for job in jobs if is_known and job.record.ended and job.record.ended <= latest]

    def is_going(self, package: str) -> bool:
        """Whether ``package`` is being removed with the last job that used it."""
        users = [job for job in self._pool.jobs.values() if job.record.spec.package == package]
        return bool(users) and all(job.record.is_deleted for job in users)

    def on_removed(self, name: str) -> None:
        """Forget a job for which nothing is stored any more."""
        self._deleted.discard(name)  # its removal was under way when the core started over
        job = self._pool.jobs.pop(name, None)
        for command in job.record.applied_commands if job else ():
            self._pool.applied_commands.pop(command, None)

    def on_host_removed(self, host: str) -> None:
        """Forget a host whose record is gone, as soon as no worker holds a slot of it."""
        self._left_hosts.add(host)
        self._forget_hosts()

    def on_host(self, host: str) -> None:
        """Handle that a host has a record."""
        self._left_hosts.discard(host)

    def _forget_hosts(self) -> None:
        for name in list(self._left_hosts):
            if name not in self._pool.hosts or not self._pool.held_on(name):
                self._pool.forget_host(name)
                self._left_hosts.discard(name)
