"""What is known of jobs and hosts: built from what other services store and send, and lost with the process.

- A record replaces what was known of its job or host, unless it is of an older revision.
- Of two reports of progress the one of the higher generation counts, and within a generation that of the higher
  iteration: a late report moves nothing back, while a job that resumes from a checkpoint does go back.
- A heartbeat counts for the incarnation of its host that the registry knows.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from resile_shared.http.api import HostList, HostView, JobList, JobView
from resile_shared.messages.hosts import Heartbeat, HostRecord
from resile_shared.messages.jobs import HistoryItem, JobRecord
from resile_shared.messages.reports import Failed, Progress, Report, Warned

from .views import JobReports, active_slots, host_view, job_summary, job_view

MAX_WARNINGS = 100
MAX_GONE = 10_000
"""At most this many jobs and hosts are remembered without a record."""

R = TypeVar("R")


class Projection:
    """All that the monitor knows. It only records what it is given, and answers from that."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobRecord] = {}
        self._hosts: dict[str, HostRecord] = {}
        self._revisions: dict[tuple[str, str], int] = {}
        self._told: dict[str, JobReports] = {}
        self._beats: dict[str, Heartbeat] = {}

    # in

    def store_job(self, job: str, record: JobRecord | None, *, revision: int) -> None:
        """Record what is stored of a job; None: it is gone."""
        if self._is_newer("job", job, revision):
            _put(self._jobs, job, record if record and not record.is_deleted else None)
            if job not in self._jobs:
                self._told.pop(job, None)

    def store_host(self, host: str, record: HostRecord | None, *, revision: int) -> None:
        """Record what is stored of a host; None: it is gone."""
        if self._is_newer("host", host, revision):
            _put(self._hosts, host, record)
            if record is None:
                self._beats.pop(host, None)

    def beat(self, beat: Heartbeat) -> None:
        """Record what runs on a host."""
        known = self._beats.get(beat.host)
        if known is None or (beat.incarnation, beat.number) > (known.incarnation, known.number):
            self._beats[beat.host] = beat
            for worker in beat.workers:
                if worker.exit and worker.exit.details:
                    self._of(worker.job).exit_details = worker.exit.details

    def report(self, report: Report) -> None:
        """Record what a worker reports; what the records hold anyway is ignored."""
        reports = self._of(report.job)
        match report.content:
            case Progress(iteration=iteration) as progress:
                if (report.generation, iteration) >= (
                    reports.generation,
                    reports.progress.iteration if reports.progress else 0,
                ):
                    reports.on_progress(report, progress)
            case Failed() as failed:
                reports.failed = failed
            case Warned(message=message):
                if len(reports.warnings) < MAX_WARNINGS:
                    reports.warnings[message] = None

    def _of(self, job: str) -> JobReports:
        reports = self._told.setdefault(job, JobReports())
        if len(self._told) > len(self._jobs) + MAX_GONE:  # reports may arrive before the records of their jobs
            del self._told[next(name for name in self._told if name not in self._jobs)]
        return reports

    def _is_newer(self, kind: str, key: str, revision: int) -> bool:
        if revision <= self._revisions.get((kind, key), 0):
            return False
        self._revisions.pop((kind, key), None)
        self._revisions[kind, key] = revision
        if len(self._revisions) > len(self._jobs) + len(self._hosts) + MAX_GONE:
            gone = next(
                key for key in self._revisions if key[1] not in (self._jobs if key[0] == "job" else self._hosts)
            )
            del self._revisions[gone]
        return True

    # out

    def record(self, job: str) -> JobRecord | None:
        """Return what is stored of a job."""
        return self._jobs.get(job)

    def job(self, record: JobRecord, history: Sequence[HistoryItem]) -> JobView:
        """Return all about the job of ``record``, with the part of its history that is shown."""
        return job_view(record, self._told.get(record.job, JobReports()), history)

    def jobs(self) -> JobList:
        """Return all jobs, in the order of their submission."""
        jobs = (job_summary(record, self._told.get(record.job, JobReports())) for record in self.records())
        return JobList(jobs=tuple(jobs))

    def records(self) -> list[JobRecord]:
        """Return what is stored of all jobs, in the order of their submission."""
        return sorted(self._jobs.values(), key=lambda record: (record.submitted, record.job))

    def host(self, host: str) -> HostView | None:
        """Return all about one host."""
        return next((view for view in self._host_views([host])), None)

    def hosts(self) -> HostList:
        """Return all hosts, by name."""
        return HostList(hosts=tuple(self._host_views(sorted(self._hosts))))

    def host_records(self) -> list[HostRecord]:
        """Return what is stored of all hosts, by name."""
        return [self._hosts[host] for host in sorted(self._hosts)]

    def _host_views(self, hosts: Iterable[str]) -> Iterable[HostView]:
        holders = {slot: record.job for record in self._jobs.values() for slot in active_slots(record)}
        for host in hosts:
            if record := self._hosts.get(host):
                yield host_view(record, self._beats.get(host), holders)


def _put(records: dict[str, R], key: str, record: R | None) -> None:
    if record is None:
        records.pop(key, None)
    else:
        records[key] = record
