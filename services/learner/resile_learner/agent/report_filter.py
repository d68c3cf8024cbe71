"""Which of the messages of workers an agent passes on as reports, and when. Pure.

Progress replaces earlier progress and is passed on a few times a second; everything else is passed on in order, after
the progress that preceded it. Of the warnings of a worker, the first `MAX_WARNINGS` that differ are passed on, each
once, and then one that says that there are more.
"""

from resile_shared.messages.jobs import MAX_WARNINGS
from resile_shared.messages.message import at
from resile_shared.messages.reports import Report

from ..messages import MemberMessage, Progress, ReportedByWorker, Warned, content_of
from .worker_records import Worker

PROGRESS_SECONDS = 0.25


class ReportFilter:
    """The reports of the workers of one incarnation. Methods return what to publish now, in order."""

    def __init__(self, host: str, incarnation: int) -> None:
        self._host = host
        self._incarnation = incarnation
        self._progress: dict[str, Report] = {}  # not passed on yet
        self._progress_at: dict[str, float] = {}

    def warn(self, job: str, warned: Warned, worker: Worker, *, now: float) -> list[Report]:
        """Pass on a warning, unless the worker has given it before, or too many others."""
        if warned.message in worker.warnings or len(worker.warnings) > MAX_WARNINGS:
            return []
        if len(worker.warnings) == MAX_WARNINGS:
            text = f"worker {warned.worker} warned of more than {MAX_WARNINGS} things: its other warnings are left out"
            warned = Warned(worker=warned.worker, message=text)
        worker.warnings.add(warned.message)
        return self.report(job, warned, worker, now=now)

    def report(self, job: str, message: ReportedByWorker, worker: Worker, *, now: float) -> list[Report]:
        """Pass on a message, which may be kept for a moment if it is progress."""
        report = Report(
            job=job,
            host=self._host,
            incarnation=self._incarnation,
            worker=message.worker,
            slot=worker.slot,
            generation=message.generation if isinstance(message, MemberMessage) else worker.generation,
            time=at(now),
            content=content_of(message),
        )
        if not isinstance(message, Progress):
            return [*self.take_progress(job), report]
        self._progress[job] = report
        is_due = now - self._progress_at.get(job, 0.0) >= PROGRESS_SECONDS
        if not (is_due or message.ends_epoch):
            return []
        self._progress_at[job] = now
        return self.take_progress(job)

    def take_progress(self, job: str) -> list[Report]:
        """Return the progress of a job that is not passed on yet."""
        progress = self._progress.pop(job, None)
        return [progress] if progress else []

    def take_all_progress(self) -> list[Report]:
        """Return the progress of all jobs that is not passed on yet."""
        return [report for job in list(self._progress) for report in self.take_progress(job)]

    def forget(self, job: str) -> None:
        """Forget when the progress of a job, which has no worker here any more, was passed on."""
        self._progress_at.pop(job, None)
