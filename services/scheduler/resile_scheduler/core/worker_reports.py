"""Reports of workers: faster than heartbeats, and more detailed. They may be late, doubled or lost."""

from typing import Literal

from resile_shared.messages.hosts import WorkerExit
from resile_shared.messages.jobs import Intent
from resile_shared.messages.reports import (
    CheckpointSaved,
    Completed,
    Failed,
    GrowthRefused,
    Left,
    PeerSuspected,
    Progress,
    Ready,
    Report,
    Switched,
    Warned,
)

from .allocator import Allocator
from .job_commands import JobCommands
from .job_ends import JobEnds
from .losses.probing import HostProber
from .losses.worker_ends import WorkerEnds
from .state.job import Job
from .state.pool import Pool
from .state.worker import Phase, Worker


class WorkerReports:
    """Handles the reports of workers."""

    def __init__(
        self,
        pool: Pool,
        allocator: Allocator,
        job_ends: JobEnds,
        worker_ends: WorkerEnds,
        job_commands: JobCommands,
        prober: HostProber,
    ) -> None:
        self._pool = pool
        self._allocator = allocator
        self._job_commands = job_commands
        self._prober = prober
        self._job_ends = job_ends
        self._worker_ends = worker_ends

    def handle(self, report: Report, *, now: float) -> None:
        """Handle a report about a job or by a worker."""
        job = self._pool.jobs.get(report.job)
        if job is None or job.is_over:
            return
        is_current = job.generations.may_be_active(report.generation)
        match report.content:
            case Switched(iteration=iteration) as switched:
                if job.generations.is_changing_to(report.generation):
                    job.observer.on_switched(report, switched)
                self._allocator.activate(job, report.generation, iteration=iteration, now=now)
            case CheckpointSaved() as checkpoint if checkpoint.lineage == job.record.lineage:
                self._on_checkpoint(job, checkpoint, now)
            case Completed() as completed if is_current:
                self._on_completed(job, report, completed, now)
            case Progress(iteration=iteration) as progress if is_current and job.generations.has_started:
                job.advance(iteration)
                if job.record.ready is not None and report.generation == job.generations.active_number:
                    is_changing = job.generations.is_settling
                    job.observer.on_progress(report, progress, ready=job.record.ready, is_changing=is_changing)
            case PeerSuspected() as accusation if is_current:
                self._prober.accuse(job, report, accusation, now=now)
            case _:
                if worker := job.workers.get(report.worker):
                    self._on_worker(job, worker, report, now)

    def _on_worker(self, job: Job, worker: Worker, report: Report, now: float) -> None:
        match report.content:
            case Ready() as ready:
                self._on_ready(job, worker, ready, now)
            case Left():
                self._pool.advance(job, worker, Phase.LEFT)
            case Warned(message=message):
                job.warn(message, now=now)
            case GrowthRefused() as refused:
                self._on_growth_refused(job, refused, report.generation, now)
            case Failed(message=message, details=details) as failed:
                kind: Literal["abandoned", "failed"] = "abandoned" if failed.is_state_lost else "failed"
                how = WorkerExit(kind=kind, message=message, details=details, is_refusal=failed.is_refusal)
                self._worker_ends.on_failed(job, worker, how, now=now)

    def _on_ready(self, job: Job, worker: Worker, ready: Ready, now: float) -> None:
        """Handle that a script has reached its training call, which must agree with those of the other workers."""
        self._pool.advance(job, worker, Phase.READY)
        if job.record.ready is None:
            job.set_ready(ready, worker=worker.number)
            self._pool.changed(job, f"{job.id} can use {ready.num_shards} workers", by=job.id)
        elif difference := _difference(job.record.ready, ready):
            others = "the others" if job.first_ready is None else f"worker {job.first_ready}"
            text = (
                f"it disagrees with {others} on {difference}: the script must make the same training call in every "
                "worker"
            )
            self._worker_ends.on_failed(job, worker, WorkerExit(kind="failed", message=text), now=now)

    def _on_growth_refused(self, job: Job, refused: GrowthRefused, generation: int, now: float) -> None:
        """Withdraw a generation that a member cannot follow; the job stays as it is, and below that size for a while.

        A job that has to have so many workers fails.
        """
        newest = job.generations.newest
        if newest is None or newest.generation != generation:
            return
        most = max(refused.most_workers, len(job.generations.active) if job.generations.has_started else 0)
        if most < (job.target.workers if job.target.is_exact else job.least_workers):
            self._job_ends.fail(job, refused.message, now=now)
            return
        job.growth_limit.set(most, now=now)
        job.warn(refused.message, now=now)
        if job.generations.is_cold_starting:
            self._allocator.cancel_start(job, may_have_trained=False)
        job.explain_change(f"withdrawn: {refused.message}")
        self._pool.changed(job)

    def _on_checkpoint(self, job: Job, checkpoint: CheckpointSaved, now: float) -> None:
        known = job.record.checkpoint
        if known is None or (checkpoint.lineage, checkpoint.iteration) > (known.lineage, known.iteration):
            job.update(checkpoint=checkpoint)
        if not checkpoint.pausing or job.record.completed or not job.generations.has_started:
            return
        if job.intent is Intent.TRAIN:
            job.intend(Intent.SUSPEND, "its workers have stopped for a pause: it starts again", now=now)
        job.go_back(checkpoint.iteration)
        self._job_commands.give_up_slots(job, now=now)

    def _on_completed(self, job: Job, report: Report, completed: Completed, now: float) -> None:
        """Handle that training is complete; the job is complete when the scripts of its members have ended.

        The report may come late, from an agent that was disconnected, when the job is already about to start again: as
        long as nothing has trained since, there is nothing left to train. In a gang, it is about the script of one
        worker.
        """
        is_torn = job.is_gang and any(worker.has_failed for worker in job.workers.values())
        if job.record.completed or is_torn:
            return
        is_late = not job.is_gang and not job.generations.has_started and 0 < report.generation == job.record.generation
        if not (is_late or job.generations.has_started or report.generation in job.generations.orders):
            return
        self._allocator.activate(job, report.generation, iteration=completed.iteration, now=now)
        job.go_back(completed.iteration)
        job.update(completed=completed)
        self._pool.changed(job, f"{job.id} completed", by=job.id)
        if is_late:
            self._job_ends.complete(job, now=now)
        else:
            self._worker_ends.check_members(job, now=now)


def _difference(one: Ready, other: Ready) -> str:
    """Name the first thing that two training calls disagree on; empty if there is none."""
    for name in ("iterations_total", "num_shards", "batch_size", "batch_range", "epochs", "samples"):
        if (left := getattr(one, name)) != (right := getattr(other, name)):
            return f"{name.replace('_', ' ')} ({right} instead of {left})"
    return ""
