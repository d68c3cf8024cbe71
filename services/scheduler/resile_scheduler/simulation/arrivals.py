"""Workloads of profiled applications, from CSV files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .csv_table import MOMENT, MalformedFile, Row, cell, moment, positive_int, read_rows
from .profiles import Application

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


@dataclass(frozen=True)
class Arrival:
    """A job of a workload: submitted at ``time`` seconds, with a static request of ``workers`` and ``batch_size``."""

    job: str
    time: float
    application: Application
    workers: int
    batch_size: int
    line: int = field(default=0, compare=False)
    """The line of the file."""


def read_arrivals(path: Path, applications: Mapping[str, Application], *, num_slots: int) -> list[Arrival]:
    """Return the jobs of a workload, in the order of their submission.

    The columns are ``name, time, application, num_replicas, batch_size``; the last two are the static request.

    Raises:
        MalformedFile: the file cannot be read, an application has no profile, a name comes twice, or a request fits
            neither ``num_slots`` nor the application's batches.

    """
    arrivals: dict[str, Arrival] = {}
    for row in read_rows(path, COLUMNS):
        arrival = _arrival(path, row, applications, num_slots)
        if arrival.job in arrivals:
            raise MalformedFile(path, f"there are two jobs {arrival.job}", line=row[0], column="name")
        arrivals[arrival.job] = arrival
    return sorted(arrivals.values(), key=lambda arrival: arrival.time)


def _arrival(path: Path, row: Row, applications: Mapping[str, Application], num_slots: int) -> Arrival:
    line, cells = row
    application = applications.get(cells["application"])
    if application is None:
        problem = f"no profile of {cells['application']!r}: there are {', '.join(sorted(applications))}"
        raise MalformedFile(path, problem, line=line, column="application")
    workers = cell(path, row, "num_replicas", positive_int, expected="a whole number of workers")
    if workers > num_slots:
        problem = f"{workers} workers, and the cluster has {num_slots} slots"
        raise MalformedFile(path, problem, line=line, column="num_replicas")
    batch_size = cell(path, row, "batch_size", positive_int, expected="a whole number of samples")
    least = max(application.initial_batch, application.smallest_local * workers)
    if not least <= batch_size <= application.largest_batch:
        problem = f"{workers} workers of {application.name} take {least} to {application.largest_batch} samples"
        raise MalformedFile(path, problem, line=line, column="batch_size")
    return Arrival(
        job=cells["name"],
        time=cell(path, row, "time", moment, expected=MOMENT),
        application=application,
        workers=workers,
        batch_size=batch_size,
        line=line,
    )
