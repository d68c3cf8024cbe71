"""Commands on jobs. A command has its effect once, though it may arrive twice."""

from hashlib import sha256

from resile_shared.messages.commands import (
    ID_REUSED,
    Accepted,
    JobDelete,
    JobPause,
    JobPriority,
    JobResume,
    JobStop,
    Refused,
)
from resile_shared.messages.jobs import Intent, JobRecord, JobSpec, JobState
from resile_shared.messages.message import at, timestamp

from .allocator import Allocator
from .events import JobChangeRequested, JobSubmitted
from .job_ends import JobEnds
from .retention import Retention
from .state.job import Job
from .state.lifecycle import Step
from .state.pool import Pool

Answer = Accepted | Refused


class JobCommands:
    """Handles commands, and returns the answers."""

    def __init__(self, pool: Pool, allocator: Allocator, ends: JobEnds, retention: Retention) -> None:
        self._pool = pool
        self._retention = retention
        self._allocator = allocator
        self._ends = ends

    def submit(self, event: JobSubmitted, *, now: float) -> Answer:
        """Accept a job."""
        if earlier := self._applied_to(event.command):
            return Accepted(job_id=earlier.id) if _is_submission(event, earlier) else ID_REUSED
        if event.job in self._pool.jobs:
            return Refused(code="conflict", reason=f"there is a job {event.job} already: submit it again")
        if self._retention.is_going(event.spec.package):
            reason = "its package is being removed with the last job that used it: upload it again in some seconds"
            return Refused(code="conflict", reason=reason)
        deadline = event.spec.deadline
        if deadline is not None and deadline <= at(now):
            return Refused(code="invalid", reason=f"its deadline, {timestamp(deadline)}, has passed: give a later one")
        record = JobRecord(
            job=event.job or f"job-{self._pool.last_number + 1}",
            spec=event.spec,
            state=JobState.ACCEPTED,
            priority=event.spec.priority,
            submitted=at(now),
            spec_sha256=_digest(event.spec),
        )
        job = self._pool.add_job(record)
        self._mark_applied(job, event.command)
        job.note("accepted", "", now=now)
        self._pool.changed(job, f"fair share with {job.id}", by=job.id)
        return Accepted(job_id=job.id)

    def change(self, event: JobChangeRequested, *, now: float) -> Answer:
        """Change a job."""
        request = event.request
        if earlier := self._applied_to(event.command):
            is_same = earlier.id == request.job_id and earlier.record.applied_commands[0] != event.command
            return Accepted(job_id=earlier.id) if is_same else ID_REUSED
        job = self._pool.jobs.get(request.job_id)
        if job is None or job.record.is_deleted:
            return Refused(code="unknown", reason=f"there is no job {request.job_id}: `resile jobs` lists them")
        if isinstance(request, JobDelete):
            return self._delete(job)
        if job.is_over:
            return Refused(code="conflict", reason=_ended(job))
        if isinstance(request, JobPause) and (obstacle := _obstacle_to_pause(job)):
            return Refused(code="conflict", reason=obstacle)
        self._mark_applied(job, event.command)
        match request:
            case JobPriority(priority=priority):
                self._change_priority(job, priority, now)
            case JobStop(reason=reason):
                self._ends.stop(job, reason or "requested", now=now)
            case JobPause():
                self._pause(job, now)
            case JobResume():
                self._resume(job, now)
        return Accepted(job_id=job.id)

    def _applied_to(self, command: str) -> Job | None:
        """Return the job to which a command with this id was applied, if there was one."""
        return self._pool.jobs.get(self._pool.applied_commands.get(command, ""))

    def _delete(self, job: Job) -> Answer:
        if not job.is_over:
            state = job.record.state.value
            return Refused(code="conflict", reason=f"job {job.id} is {state}: stop it first (`resile stop {job.id}`)")
        self._retention.delete(job)
        return Accepted(job_id=job.id)

    def _mark_applied(self, job: Job, command: str) -> None:
        self._pool.applied_commands[command] = job.id
        self._pool.touch(job)
        if forgotten := job.mark_applied(command):
            self._pool.applied_commands.pop(forgotten, None)

    def _change_priority(self, job: Job, priority: int, now: float) -> None:
        before = job.record.priority
        if priority == before:
            return
        change = "raised" if priority > before else "lowered"
        job.update(priority=priority)
        job.note("priority", f"{change} from {before} to {priority}", now=now)
        self._pool.changed(job, f"priority of {job.id} {change}")

    def _pause(self, job: Job, now: float) -> None:
        """Pause a job that does not train at once; one that trains saves a checkpoint first."""
        if job.record.state is JobState.PAUSED:
            return
        if job.intent is not Intent.PAUSE:
            job.intend(Intent.PAUSE, "requested", now=now)
        if not (job.keeps_state and job.generations.has_started):  # there is no checkpoint to wait for
            self.give_up_slots(job, now=now)
        self._pool.changed(job, f"{job.id} paused")

    def give_up_slots(self, job: Job, *, now: float) -> None:
        """Pause or suspend the job now: its checkpoint is saved."""
        is_pause = job.intent is Intent.PAUSE
        self._allocator.abandon(job, job.intent.value)
        job.release_slots()
        reason = "requested" if is_pause else "saved, waiting for slots again"
        job.note(job.record.state.value, reason, now=now)
        self._pool.changed(job, f"{job.id} {job.record.state.value}")

    def _resume(self, job: Job, now: float) -> None:
        if job.record.state is JobState.PAUSED:
            job.enter(Step.RESUME)
            job.start_backoff.forget()
            self._pool.changed(job, f"{job.id} resumed", by=job.id)
        elif job.intent is Intent.PAUSE:
            # its workers may have stopped already, so the pause has to be completed
            job.intend(Intent.SUSPEND, "resumed while it was pausing: it starts again", now=now)


def _ended(job: Job) -> str:
    """Return why ``job``, which has ended, cannot be changed."""
    reason = f"job {job.id} is {job.record.state.value} and cannot change"
    if job.record.state is JobState.STOPPED:
        reason += ": submit it again; `resile pause` keeps a job that is to continue later"
    return reason


def _obstacle_to_pause(job: Job) -> str:
    """Return why ``job`` cannot be paused, or an empty string."""
    if job.record.completed:
        return f"job {job.id} has completed its training"
    if job.must_keep_slots:
        return f"job {job.id} is a gang without --restartable and cannot start again: it can only be stopped"
    return ""


def _is_submission(event: JobSubmitted, job: Job) -> bool:
    """Whether ``event`` is what ``job`` was submitted with."""
    return job.record.applied_commands[0] == event.command and job.record.spec_sha256 == _digest(event.spec)


def _digest(spec: JobSpec) -> str:
    return sha256(spec.model_dump_json().encode()).hexdigest()
