"""What follows when a worker's process ends, or a worker cannot go on.

- A joiner is withdrawn. The last one of those that a whole job moves to is a lost member: it may have the state
  already, and those that handed it over wait for a recovery.
- An initial member that ends before its job has started makes the job start again, unless its script is at fault.
- A member is lost; `recovery.py` decides how its job goes on. If its script was refused, the job fails at once: the
  others would train wrongly, though they did not notice.
- Once training is complete, only an error of the script can fail its job. A gang is complete only when all of its
  scripts have ended without an error: until then a loss counts, though the first rank has ended.
- The end of a worker that no generation names means nothing.
"""

from resile_shared.messages.hosts import WorkerExit

from ..allocator import Allocator
from ..job_ends import JobEnds
from ..state.job import Job
from ..state.pool import Pool
from ..state.worker import LOST, SCRIPT_ERRORS, Phase, Worker
from .recovery import MAX_FAILURES, MAX_SCRIPT_ERRORS

MAX_STARTS = 3
MAX_UNLINKED_STARTS = 10
"""More than `MAX_STARTS`, since a network outage may end: with their pauses they take some twenty minutes."""


class WorkerEnds:
    """Handles the ends of workers. Each has its effect once."""

    def __init__(self, pool: Pool, allocator: Allocator, job_ends: JobEnds) -> None:
        self._pool = pool
        self._allocator = allocator
        self._job_ends = job_ends

    def on_gone(self, job: Job, worker: Worker, how: WorkerExit, *, now: float) -> None:
        """Handle the end of a worker's process, or of its host."""
        if worker.phase is Phase.GONE:
            return
        was_member = worker.phase is Phase.MEMBER
        worker.end(how)
        self._pool.changed(job)
        if job.is_over:
            return
        is_complete = job.record.completed is not None and not job.is_gang
        is_expected = how.kind in ("finished", "left") or (is_complete and how.kind not in SCRIPT_ERRORS)
        if not is_expected:
            self.on_failed(job, worker, how, now=now, was_member=was_member)
        if not job.is_over:
            self.check_members(job, now=now)

    def on_failed(self, job: Job, worker: Worker, how: WorkerExit, *, now: float, was_member: bool = False) -> None:
        """Handle the failure of a worker, reported by itself or by its agent."""
        is_active = worker.number in job.generations.members
        is_named = is_active or worker.number in job.generations.named
        if worker.has_failed or worker.is_fenced or job.is_over or not is_named:
            return
        worker.fail(how, now=now)
        runs_script = job.is_gang and job.generations.is_cold_starting
        if runs_script or is_active or was_member or worker.phase is Phase.MEMBER or _may_have_taken_over(job, worker):
            self._lose_member(job, worker, now, is_refused=how.is_refusal)
        elif job.generations.names(worker.number) and job.generations.has_started:
            self._withdraw_joiner(job, worker, now)
        elif job.generations.names(worker.number):
            self._give_up_start(job, worker, now)

    def check_members(self, job: Job, *, now: float) -> None:
        """Complete the job if its training is complete and all members are gone."""
        is_completed = job.record.completed is not None
        newest = () if is_completed else job.generations.placements
        counted = {placement.worker for placement in (*job.generations.active, *newest)}
        alive = [number for number in counted if (w := job.workers.get(number)) and w.phase < Phase.GONE]
        if alive or not (counted or job.suspicions.vanished):
            return
        if not is_completed:
            job.generations.mark_gone(now=now)
            return
        self._job_ends.complete(job, now=now)

    def on_start_late(self, job: Job, worker: Worker, why: str, *, now: float) -> None:
        """Give up a cold start in which ``worker`` does not reach its training call."""
        counts = job.count_failures(failed_starts=job.record.failures.failed_starts + 1)
        self._end_start(job, worker, _describe(worker, why), is_final=counts.failed_starts >= MAX_STARTS, now=now)

    def on_start_unlinked(self, job: Job, worker: Worker, why: str, *, now: float) -> None:
        """Give up a cold start whose members do not reach each other; the job avoids the host of ``worker`` first."""
        counts = job.count_failures(unlinked_starts=job.record.failures.unlinked_starts + 1)
        self._end_start(
            job, worker, _describe(worker, why), is_final=counts.unlinked_starts >= MAX_UNLINKED_STARTS, now=now
        )

    def _give_up_start(self, job: Job, worker: Worker, now: float) -> None:
        counts = job.count_failures(failed_starts=job.record.failures.failed_starts + worker.may_be_at_fault)
        is_final = worker.has_own_fault or counts.failed_starts >= MAX_STARTS
        self._end_start(job, worker, worker.reason, is_final=is_final, now=now)

    def _end_start(self, job: Job, worker: Worker, reason: str, *, is_final: bool, now: float) -> None:
        if is_final:
            self._job_ends.fail(job, reason, now=now)
            return
        job.backoff.add(worker.slot.host, now=now)
        job.start_backoff.end(job.iteration, now=now)
        self._allocator.cancel_start(job, may_have_trained=worker.failure in LOST)
        job.note("queued", f"its start was cancelled: {reason}", now=now)

    def _lose_member(self, job: Job, worker: Worker, now: float, *, is_refused: bool) -> None:
        """Record the loss of a member: all members that are lost by the next decision are answered together."""
        if job.is_gang:
            job.update(completed=None)
        elif job.record.completed or is_refused:
            self._job_ends.fail(job, worker.reason, now=now)
            return
        worker.lose()
        newest = job.generations.newest
        if job.generations.is_cold_starting and newest is not None:
            self._allocator.activate(job, newest.generation, iteration=job.iteration, now=now)
        if worker.has_own_fault:
            job.backoff.add(worker.slot.host, now=now)
        self._pool.changed(job)

    def _withdraw_joiner(self, job: Job, worker: Worker, now: float) -> None:
        """Drop a joiner. A job that needs an exact number of workers fails when that happens again and again."""
        failed_joins = job.record.failures.failed_joins + worker.may_be_at_fault
        job.count_failures(failed_joins=failed_joins)
        if job.target.is_exact and failed_joins >= (MAX_SCRIPT_ERRORS if worker.has_own_fault else MAX_FAILURES):
            self._job_ends.fail(job, worker.reason, now=now)
            return
        job.backoff.add(worker.slot.host, now=now)
        job.explain_change(f"withdrawn: {worker.reason}")
        self._pool.changed(job)


def _may_have_taken_over(job: Job, worker: Worker) -> bool:
    """Whether the job may have moved as a whole to workers that have all failed, ``worker`` among them."""
    if job.record.completed or not job.generations.has_started:
        return False
    moves = job.generations.moves_to(worker.number)
    return any(all(w is None or w.has_failed for w in map(job.workers.get, workers)) for workers in moves)


def _describe(worker: Worker, why: str) -> str:
    return f"worker {worker.number} on {worker.slot.name} is {why}"
