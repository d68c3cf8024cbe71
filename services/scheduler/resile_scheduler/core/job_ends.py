"""How a job ends: it completes, fails or is stopped. All its workers end with it."""

from resile_shared.messages.hosts import AFTER_TRAINING

from .allocator import Allocator
from .events import JobFault
from .state.job import Job
from .state.lifecycle import Step
from .state.pool import Pool


class JobEnds:
    """Ends jobs."""

    def __init__(self, pool: Pool, allocator: Allocator) -> None:
        self._pool = pool
        self._allocator = allocator

    def complete(self, job: Job, *, now: float) -> None:
        """End the job: its result is stored, and no member has anything left to do."""
        self._end(job, Step.COMPLETE, "completed", "", now=now)

    def fail(self, job: Job, reason: str, *, now: float) -> None:
        """End the job with an error."""
        if job.record.completed and AFTER_TRAINING not in reason:
            reason = f"{reason}, {AFTER_TRAINING}"
        self._end(job, Step.FAIL, "failed", reason, now=now)

    def stop(self, job: Job, reason: str, *, now: float) -> None:
        """End the job because a user asked for it."""
        self._end(job, Step.STOP, "stopped", reason, now=now)

    def on_not_stored(self, name: str, reason: str, *, now: float) -> None:
        """End a job that cannot be stored: a job that a new scheduler would not know must not go on.

        A job whose training is complete still completes, without the details of its result. One that is being removed,
        or was by now, is stored no more.
        """
        job = self._pool.jobs.get(name)
        if job is None or job.record.is_deleted:
            return
        completed = job.record.completed
        if completed is not None:
            job.update(completed=completed.brief())
            job.warn(f"the ledger and the metrics of its result cannot be stored: {reason}", now=now)
        elif not job.is_over:
            self.fail(job, f"it cannot be stored: {reason}", now=now)

    def on_fault(self, fault: JobFault, *, now: float) -> None:
        """End a job whose report could not be handled, if it is still there."""
        job = self._pool.jobs.get(fault.job)
        if job is not None and not job.is_over:
            self.fail(job, fault.reason, now=now)

    def _end(self, job: Job, step: Step, kind: str, reason: str, *, now: float) -> None:
        self._allocator.abandon(job, kind)
        job.enter(step)
        job.note(kind, reason, now=now)
        self._pool.changed(job, f"{job.id} {kind}")
