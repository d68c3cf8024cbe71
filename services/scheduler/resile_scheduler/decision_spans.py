"""The spans of decisions. A decision upon a message is named by it; one upon the time, by what it comes to."""

from collections.abc import Sequence

from resile_shared.messages.allocations import Loss
from resile_shared.messages.hosts import Heartbeat
from resile_shared.messages.reports import Progress, Report
from resile_shared.telemetry.traces import Value

from .core.events import (
    Command,
    Event,
    JobChangeRequested,
    ProbeExpired,
    ProbeHost,
    RemoveJob,
    StateRestored,
    StoreJob,
    Tick,
    WriteAllocation,
)

JOB_FAILED, WORKER_LOST, HOST_LOST, OTHER = "job failed", "worker lost", "host lost", "instruct hosts"
OUTCOMES: dict[type, str] = {
    WriteAllocation: "resize jobs",
    RemoveJob: "remove jobs",
    ProbeHost: "probe host",
    StoreJob: "update jobs",
}
"""What commands come to if no job has failed or lost a worker, by their kind; the first that is there counts."""


def is_timed(event: Event) -> bool:
    """Whether time alone leads to it, or what comes again and again: it has a span only if commands follow."""
    is_progress = isinstance(event, Report) and isinstance(event.content, Progress)
    return isinstance(event, Heartbeat | Tick | ProbeExpired) or is_progress


def name_of(event: Event, commands: Sequence[Command] = ()) -> str:
    """Return the name of the span of a decision; ``commands`` are needed for a timed one."""
    if is_timed(event):
        return outcome_of(commands)
    if isinstance(event, Report):
        return f"decide upon report: {event.content.kind.replace('_', ' ')}"
    request = event.request if isinstance(event, JobChangeRequested) else event
    return f"decide upon {type(request).__name__}"


def about(event: Event, commands: Sequence[Command] = ()) -> dict[str, Value]:
    """Return the job and the host that a decision is about."""
    request = event.request if isinstance(event, JobChangeRequested) else event
    job = getattr(request, "job_id", "") or getattr(request, "job", "")
    host = getattr(request, "host", "")
    jobs = [job] if job else jobs_of(commands)
    return {**of_jobs(jobs), **({"host": host} if host else {})}


def of_jobs(jobs: Sequence[str]) -> dict[str, Value]:
    """Return the attribute that names one job, or the one that names several."""
    return {"job" if len(jobs) == 1 else "jobs": ",".join(jobs)} if jobs else {}


def jobs_of(commands: Sequence[Command]) -> list[str]:
    """Return the jobs that commands change, each once."""
    stored = [command.record.job for command in commands if isinstance(command, StoreJob)]
    written = [command.allocation.job for command in commands if isinstance(command, WriteAllocation)]
    return list(dict.fromkeys([*stored, *written]))


def losses(commands: Sequence[Command]) -> list[tuple[str, Loss]]:
    """Return the jobs to whose losses of members a decision responds, with each loss.

    The item with which a history shows that the survivors go on comes later, with what they report.
    """
    found = [(c.allocation.job, c.allocation.loss) for c in commands if isinstance(c, WriteAllocation)]
    stored = [command for command in commands if isinstance(command, StoreJob)]
    found += [(c.record.job, item.loss) for c in stored for item in c.items if item.kind != "allocation"]
    return [(job, loss) for job, loss in found if loss is not None]


def failures(event: Event, commands: Sequence[Command]) -> list[tuple[str, str]]:
    """Return the kind and the reason of each failure that a decision responds to: of a job, of workers, of a host."""
    stored = [command for command in commands if isinstance(command, StoreJob)]
    failed = [command.record for command in stored if any(item.kind == "failed" for item in command.items)]
    found = [(JOB_FAILED, f"{record.job}: {record.reason}") for record in failed]
    if isinstance(event, StateRestored):  # it writes again what another scheduler has decided
        return found
    return found + [
        (HOST_LOST if loss.host else WORKER_LOST, f"{job}: {loss.reason}") for job, loss in losses(commands)
    ]


def outcome_of(commands: Sequence[Command]) -> str:
    """Return what commands come to; of several, what matters most to a reader."""
    stored = [command for command in commands if isinstance(command, StoreJob)]
    if any(item.kind == "failed" for command in stored for item in command.items):
        return JOB_FAILED
    if losses(commands):
        return WORKER_LOST
    return next((name for kind, name in OUTCOMES.items() if any(isinstance(each, kind) for each in commands)), OTHER)
