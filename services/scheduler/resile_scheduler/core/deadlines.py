"""What happens because time has passed: backoffs end, joiners that do not join are withdrawn, drains end."""

from dataclasses import dataclass

from resile_shared.messages.hosts import HostRecord, HostState, WorkerExit
from resile_shared.messages.message import at

from .job import Job
from .pool import Pool
from .recovery import Recovery
from .worker import Phase, Worker
from .worker_ends import WorkerEnds

JOIN_SECONDS = 600.0
LINK_DETECTIONS = 10
"""How many times ``detection_seconds`` joiners that are ready may take to connect to all members."""
LINK_ITERATIONS = 2


@dataclass(frozen=True)
class LinkWait:
    """Since when all joiners of ``generation`` are ready, and which iteration it was then."""

    generation: int
    since: float
    iteration: int


class Deadlines:
    """Checks the deadlines of all jobs and hosts."""

    def __init__(self, pool: Pool, recovery: Recovery, ends: WorkerEnds, *, detection_seconds: float) -> None:
        self._pool = pool
        self._recovery = recovery
        self._ends = ends
        self._link_seconds = LINK_DETECTIONS * detection_seconds
        self._link_waits: dict[str, LinkWait] = {}

    def check(self, *, now: float) -> None:
        """Handle all deadlines that have passed."""
        for job in self._pool.jobs.values():
            if job.is_over:
                self._link_waits.pop(job.id, None)
                continue
            for host in job.backoff.expire(now=now):
                job.explain_change(f"{host} is tried again")
                self._pool.changed()
            self._recovery.tick(job, now=now)
            if job.generations.has_started:
                self._withdraw_late(job, now)
                self._withdraw_unlinked(job, now)
        for known in self._pool.hosts.values():
            self._evict(known.record, now)

    def _evict(self, host: HostRecord, now: float) -> None:
        """End the workers that a draining host still has at its deadline; their jobs recover without them."""
        if host.state is not HostState.DRAINING or host.drain_deadline is None or host.drain_deadline > at(now):
            return
        for _, worker in self._pool.held_on(host.host):
            if worker.phase is not Phase.GONE and not worker.is_fenced:
                worker.fence()
                worker.leave_behind(f"{host.host} reached its drain deadline")
                self._pool.changed()

    def _withdraw(self, job: Job, worker: Worker, why: str, now: float) -> None:
        text = f"worker {worker.number} on {worker.slot.name} is {why}"
        self._ends.on_failed(job, worker, WorkerExit(kind="abandoned", message=text), now=now)

    def _withdraw_late(self, job: Job, now: float) -> None:
        """Withdraw joiners that are not ready by their deadline."""
        for worker in list(job.workers.values()):
            is_late = worker.phase < Phase.READY and now - worker.named_at >= JOIN_SECONDS
            if is_late and worker.number in job.joiners and job.generations.names(worker.number):
                self._withdraw(job, worker, f"not ready after {JOIN_SECONDS:g} seconds", now)

    def _withdraw_unlinked(self, job: Job, now: float) -> None:
        """Withdraw joiners that are ready and do not join though training goes on: of one host at a time.

        Which of them lacks links is not known, so the host that was tried first goes first: it comes back as the last.
        """
        generations, newest = job.generations, job.generations.newest
        joiners = [job.workers[number] for number in sorted(job.joiners)]
        is_due = joiners and generations.is_settling and not generations.is_recovering
        if not newest or not newest.has_addresses or not is_due or any(j.phase < Phase.READY for j in joiners):
            self._link_waits.pop(job.id, None)
            return
        wait = self._link_waits.get(job.id)
        if wait is None or wait.generation != newest.generation:
            wait = self._link_waits[job.id] = LinkWait(newest.generation, since=now, iteration=job.iteration)
        if now - wait.since < self._link_seconds or job.iteration - wait.iteration < LINK_ITERATIONS:
            return
        for worker in [joiner for joiner in joiners if joiner.slot.host == joiners[0].slot.host]:
            why = f"ready, but had no links to all members after {self._link_seconds:g} seconds"
            self._withdraw(job, worker, why, now)
