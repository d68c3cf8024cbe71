"""Workloads from CSV files, a job in each row. The columns of the header say which kind of file it is.

- ``name, time, iterations, shard_seconds``: iterations in equal shards, which need no profile. There may also be
  ``num_shards`` (24 without it), ``min_workers``, ``max_workers``, ``sizes``, ``priority``, ``tenant``, ``deadline``.
- ``name, time, application, num_replicas, batch_size``: jobs of profiled applications (`profiles.py`), as in the
  workloads of Pollux' artifact. They begin with that batch.
- ``job_id, submission_time, num_iteration, model_name, batch_size``: jobs of models whose throughputs are tables
  (`throughputs.py`), as in ElasticFlow's traces; ``deadline`` may be added. Times count from the first submission.

A deadline is a time by the clock of the submissions. Sizes are allowed numbers of workers, as in ``1 2 4 8``. An empty
cell counts as missing.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from resile_shared.messages.jobs import DEFAULT_PRIORITY, MAX_PRIORITY, MAX_WORKERS, JobSpec
from resile_shared.messages.reports import MAX_SAMPLES, BatchRange
from resile_shared.validation import phrase

from .arrivals import COLUMNS as PROFILED
from .arrivals import read_arrivals
from .csv_table import (
    MOMENT,
    MalformedFile,
    Row,
    cell,
    check_optional,
    duration,
    moment,
    non_negative,
    positive_int,
    read_header,
    read_rows,
)
from .profiles import read_application
from .throughputs import read_models
from .training import Modelled, Profiled, Sharded, Training, too_long
from .workload import CHECKPOINT_SECONDS, Submission, Workload

T = TypeVar("T")
SHARDED = ("name", "time", "iterations", "shard_seconds")
OPTIONAL = ("num_shards", "min_workers", "max_workers", "sizes", "priority", "tenant", "deadline")
MODELLED = ("job_id", "submission_time", "num_iteration", "model_name", "batch_size")
NUM_SHARDS = 24
MOST_SHARDS = 64
GROWTH = 8
"""The ratio of the largest batch of a job of a model to the one that it begins with."""


def read_table(path: Path, *, profiles: Path | None, num_slots: int) -> Workload:
    """Return the workload in a CSV file; ``profiles`` is the folder of what its jobs train, if it needs one.

    Raises:
        MalformedFile: the file or a profile cannot be read, a job has none, or can never run on ``num_slots``.

    """
    header = read_header(path)
    readers = {SHARDED: _read_sharded, PROFILED: _read_profiled, MODELLED: _read_modelled}
    for columns, read in readers.items():
        if set(columns) <= set(header):
            if profiles is None and read is not _read_sharded:
                raise MalformedFile(path, "its jobs need a folder of profiles: --profiles DIR", column=columns[2])
            return Workload(tuple(sorted(read(path, profiles or path, num_slots), key=lambda job: job.time)))
    known = "; or ".join(", ".join(columns) for columns in readers)
    raise MalformedFile(path, f"the header needs the columns {known}; it has {', '.join(header)}")


def _read_sharded(path: Path, _: Path, num_slots: int) -> Iterable[Submission]:
    check_optional(path, OPTIONAL)
    rows = read_rows(path, SHARDED)
    for number, row in enumerate(rows, 1):
        training = Sharded(
            iterations_total=cell(path, row, "iterations", positive_int, expected="a whole number of iterations"),
            num_shards=_optional(path, row, "num_shards", _shards, f"a whole number of shards up to {MAX_WORKERS}")
            or NUM_SHARDS,
            shard_seconds=cell(
                path, row, "shard_seconds", duration, expected="a number of seconds from 0.000001 to 86400"
            ),
        )
        time = cell(path, row, "time", moment, expected=MOMENT)
        yield _submission(path, row, number, training, name=row[1]["name"], time=time, num_slots=num_slots)


def _read_profiled(path: Path, profiles: Path, num_slots: int) -> Iterable[Submission]:
    folders = [folder for folder in sorted(profiles.glob("*")) if (folder / "placements.csv").exists()]
    applications = {folder.name: read_application(folder) for folder in folders}
    for number, arrival in enumerate(read_arrivals(path, applications, num_slots=num_slots), 1):
        training = Profiled(arrival.application, arrival.batch_size)
        try:
            spec = _spec(arrival.job, max_workers=training.num_shards)
        except ValidationError as error:
            problem = phrase(error.errors()[0]["msg"])
            raise MalformedFile(path, problem, line=arrival.line, column="name") from error
        if problem := too_long(training, min(num_slots, training.num_shards)):
            raise MalformedFile(path, problem, line=arrival.line, column="application")
        yield Submission(arrival.time, f"job-{number}", spec, training, CHECKPOINT_SECONDS, bits="fast")


def _read_modelled(path: Path, profiles: Path, num_slots: int) -> Iterable[Submission]:
    check_optional(path, OPTIONAL)
    models = {model.name: model for model in read_models(profiles)}
    rows = read_rows(path, MODELLED)
    start = min(cell(path, row, "submission_time", non_negative, expected="a number of seconds") for row in rows)
    for number, row in enumerate(rows, 1):
        model = models.get(row[1]["model_name"])
        if model is None:
            problem = f"no throughputs of {row[1]['model_name']!r}: there are {', '.join(models)}"
            raise MalformedFile(path, problem, line=row[0], column="model_name")
        batch = cell(path, row, "batch_size", positive_int, expected="a whole number of samples")
        iterations = cell(path, row, "num_iteration", positive_int, expected="a whole number of iterations")
        batches = BatchRange(least=batch, most=min(GROWTH * batch, MAX_SAMPLES))
        training = Modelled(batch * iterations, model.throughput, batch, min(MOST_SHARDS, batch), batches)
        time = cell(path, row, "submission_time", partial(moment, start=start), expected=MOMENT)
        name = row[1]["job_id"]
        submission = _submission(path, row, number, training, name=name, time=time, num_slots=num_slots, start=start)
        yield replace(submission, bits="fast")


def _submission(
    path: Path,
    row: Row,
    number: int,
    training: Training,
    *,
    name: str,
    time: float,
    num_slots: int,
    start: float = 0.0,
) -> Submission:
    """Return the job of a row, with the limits that its optional columns give."""
    least = _optional(path, row, "min_workers", positive_int, "a whole number of workers") or 1
    if least > num_slots:
        problem = f"a minimum of {least} workers, and the pool has {num_slots} slots"
        raise MalformedFile(path, problem, line=row[0], column="min_workers")
    most = _optional(path, row, "max_workers", positive_int, "a whole number of workers") or training.num_shards
    if not least <= most <= MAX_WORKERS:
        problem = f"a maximum of {most} workers must be from the minimum, {least}, to {MAX_WORKERS}"
        raise MalformedFile(path, problem, line=row[0], column="max_workers")
    sizes = _optional(path, row, "sizes", _sizes, "numbers of workers, as in 1 2 4 8") or ()
    priority = _optional(path, row, "priority", positive_int, "a priority") or DEFAULT_PRIORITY
    if priority > MAX_PRIORITY:
        raise MalformedFile(path, f"{priority} is above {MAX_PRIORITY}", line=row[0], column="priority")
    deadline = _optional(path, row, "deadline", partial(moment, start=start), MOMENT)
    try:
        tenant = row[1].get("tenant") or "default"
        spec = _spec(name, min_workers=least, max_workers=most, sizes=sizes, priority=priority, tenant=tenant)
    except ValidationError as error:
        fault = error.errors()[0]
        column = str(fault["loc"][0]) if fault["loc"] else "sizes"
        raise MalformedFile(path, phrase(fault["msg"]), line=row[0], column=column) from error
    if problem := too_long(training, min(most, num_slots, training.num_shards)):
        column = "iterations" if "iterations" in row[1] else "num_iteration"
        raise MalformedFile(path, problem, line=row[0], column=column)
    return Submission(
        time,
        f"job-{number}",
        spec,
        training,
        CHECKPOINT_SECONDS,
        deadline=deadline,
    )


def _shards(text: str) -> int:
    number = positive_int(text)
    if number > MAX_WORKERS:
        raise ValueError
    return number


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(positive_int(size) for size in text.split())


def _spec(name: str, **limits: object) -> JobSpec:
    return JobSpec.model_validate({"name": name, "package": "packages/1", "script": "train.py", **limits})


def _optional(path: Path, row: Row, column: str, parse: Callable[[str], T], expected: str) -> T | None:
    if not row[1].get(column):
        return None
    return cell(path, row, column, parse, expected=expected)
