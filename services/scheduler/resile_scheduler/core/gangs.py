"""How a gang ends, or starts again. Its workers run one script that does not use Resile.

- Its membership never changes, so it cannot continue without a worker: all workers end, and the job starts again if it
  is restartable, else it fails.
- When a worker is lost, the other workers soon fail as well, or wait for it forever. So nothing is decided until the
  loss of a host would be known, or all workers have ended. External causes, such as the loss of a host, take precedence
  over errors; among equals the first one counts.
- External causes (a lost host, a kill, slots for other jobs) may end a gang any number of times. After failures of its
  own it starts again `MAX_RESTARTS` times in a row; after `STEADY_SECONDS` of running, the count starts over.
- It gives up slots to others only if it is restartable. When the pool is suspended, a gang that is not fails.
"""

from collections.abc import Sequence

from resile_shared.messages.allocations import Loss

from ..policies.demand import Target
from .allocator import Allocator
from .job_ends import JobEnds
from .state.job import Job
from .state.pool import Pool
from .state.worker import Phase, Worker

MAX_RESTARTS = 3
STEADY_SECONDS = 600.0
DETECTIONS = 2.0
"""How many times `detection_seconds` pass until the loss of a host is known."""
_HOW = "a gang cannot continue without all its workers; with --restartable it starts again"


class Gangs:
    """Ends gangs, and starts them again."""

    def __init__(self, pool: Pool, allocator: Allocator, ends: JobEnds, *, detection_seconds: float) -> None:
        self._pool = pool
        self._allocator = allocator
        self._ends = ends
        self._seconds = DETECTIONS * detection_seconds

    def answer(self, job: Job, lost: Sequence[Worker], *, since: float, now: float) -> None:
        """Decide what becomes of a gang that has ``lost`` workers, the first of them ``since``."""
        is_over = all(worker.phase is Phase.GONE for worker in job.workers.values())
        if not is_over and now - since < self._seconds:
            return
        in_turn = sorted(lost, key=lambda worker: worker.failed_at)
        outside = [worker for worker in in_turn if not worker.may_be_at_fault]
        cause = (outside or in_turn)[0]
        if not outside and job.record.spec.restartable and (failure := self._count(job, cause, now=now)):
            self._ends.fail(job, failure, now=now)
        else:
            host = cause.slot.host if cause.is_host_lost else None
            self.end(job, Loss(reason=cause.reason, host=host), now=now)

    def end(self, job: Job, loss: Loss, *, now: float) -> None:
        """End all workers of a gang; it starts again if it may."""
        if not job.record.spec.restartable:
            self._ends.fail(job, f"{loss.reason}: {_HOW}", now=now)
            return
        if _was_steady(job, now=now):
            job.start_backoff.forget()
        else:
            job.start_backoff.end(job.iteration, now=now)
        self.release(job, f"{loss.reason}: all its workers start again", now=now, loss=loss)

    def approach(self, job: Job, target: Target, *, is_suspended: bool, now: float) -> None:
        """Give up the slots of a gang that has started, if it should have none.

        It leaves a host that no longer accepts workers by starting again elsewhere.
        """
        if job.generations.gone_since is not None:
            return
        is_usable = all(map(self._pool.is_usable, job.held.values()))
        if job.record.spec.restartable and not (target.workers and is_usable):
            self.release(job, target.reason if not target.workers else "one of its hosts takes no workers", now=now)
        elif is_suspended and not target.workers:
            self._ends.fail(job, f"the pool is stopping: {_HOW}", now=now)

    def release(self, job: Job, reason: str, *, now: float, loss: Loss | None = None) -> None:
        """End all workers of a job that keeps no state; it waits for slots again."""
        self._allocator.abandon(job, reason)
        job.release_slots()
        job.note(job.record.state.value, reason, now=now, loss=loss)
        self._pool.changed(job, f"{job.id} {job.record.state.value}")

    def _count(self, job: Job, cause: Worker, *, now: float) -> str:
        """Count a failure of the gang's own; return why the job fails because of it, or an empty string."""
        known = 0 if _was_steady(job, now=now) else job.record.failures.recoveries
        counted = job.count_failures(recoveries=known + 1)
        if counted.recoveries <= MAX_RESTARTS:
            return ""
        return f"it has failed {counted.recoveries} times in a row: {cause.reason}"


def _was_steady(job: Job, *, now: float) -> bool:
    """Whether it has run for at least `STEADY_SECONDS` since its last start."""
    started = job.record.allocation
    return started is not None and now - started.time.timestamp() >= STEADY_SECONDS
