"""How fast jobs train by a throughput model: fitted to tables of measurements, or made up."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from resile_shared.messages.jobs import MAX_WORKERS

from ..policies.throughput import MOST_ITERATIONS, Line, Measurement, Measurements, Throughput
from .csv_table import MalformedFile, cell, duration, non_negative, positive_int, read_header, read_rows

SLOTS_PER_HOST = 8
"""Slots per host of the machines on which such tables were measured."""
LEAST_BATCH = 64
SAMPLE_SECONDS = 0.002
RATE = "a number of iterations per second, from one a day to a million a second, or 0"
STEP_SECONDS = 0.005


@dataclass(frozen=True)
class Model:
    """What jobs train: its speed, and its least batch in samples."""

    name: str
    throughput: Throughput
    least_batch: int


def synthetic_models() -> list[Model]:
    """Return three models, whose exchange between two workers takes 0.1, 0.5 and 2 times their computation."""
    shares = {"compute-bound": 0.1, "balanced": 0.5, "communication-bound": 2.0}
    return [Model(name, _synthetic(share), LEAST_BATCH) for name, share in shares.items()]


def _synthetic(share: float) -> Throughput:
    half = 0.5 * LEAST_BATCH * SAMPLE_SECONDS
    inside, across = Line(share * half, share * half / 50), Line(2 * share * half, share * half / 25)
    compute = Line(STEP_SECONDS, SAMPLE_SECONDS)
    return Throughput(None, compute, inside, across, num_measured=1, micro_batch_size=2 * LEAST_BATCH)


def read_models(folder: Path) -> list[Model]:
    """Return a model for each CSV file: iterations per second by global batch (rows) and number of workers (columns).

    The time of the exchange is taken to be what exceeds the line of one worker, and the largest batch of one worker to
    be as much as a worker can compute in one pass.

    Raises:
        MalformedFile: a file cannot be read.

    """
    return [_read_model(path) for path in sorted(folder.glob("*.csv"))]


def _read_model(path: Path) -> Model:
    seconds = _read_seconds(path)
    alone = Measurements()
    for (workers, batch), time in seconds.items():
        if workers == 1:
            alone.add(Measurement(1, batch, 1, time, 0.0, MOST_ITERATIONS))
    line = alone.fit().compute
    every = Measurements(micro_batch_size=max(batch for workers, batch in seconds if workers == 1))
    for (workers, batch), time in seconds.items():
        computing = min(float(line.at(np.array(batch / workers))), time)
        num_hosts = -(-workers // SLOTS_PER_HOST)
        every.add(Measurement(workers, batch, num_hosts, computing, time - computing, MOST_ITERATIONS))
    return Model(path.stem, every.fit(), min(batch for _, batch in seconds))


def _read_seconds(path: Path) -> dict[tuple[int, int], float]:
    """Return the seconds of an iteration by workers and batch; what was not measured is empty or 0."""
    header = read_header(path)
    if not header:
        raise MalformedFile(path, "it is empty: the header has the batch, and numbers of workers")
    first, *columns = header
    rows = read_rows(path, [first, "1"])
    numbers = _numbers_of_workers(path, columns)
    seconds = {}
    for row in rows:
        batch = cell(path, row, first, positive_int, expected="a whole number of samples")
        for column, workers in numbers.items():
            time = cell(path, row, column, _iteration_seconds, expected=RATE)
            if time is not None:
                seconds[workers, batch] = time
    if not any(workers == 1 for workers, _ in seconds):
        raise MalformedFile(path, "no batch was measured with one worker", column="1")
    return seconds


def _numbers_of_workers(path: Path, columns: Sequence[str]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for column in columns:
        try:
            workers = positive_int(column)
        except ValueError:
            raise MalformedFile(path, "this column is no whole number of workers", column=column) from None
        if workers > MAX_WORKERS:
            raise MalformedFile(path, f"a job has {MAX_WORKERS} workers at most", column=column)
        if workers in numbers.values():
            raise MalformedFile(path, "the header has this number of workers more than once", column=column)
        numbers[column] = workers
    return numbers


def _iteration_seconds(rate: str) -> float | None:
    """Return the seconds of an iteration; None: it was not measured."""
    per_second = non_negative(rate) if rate else 0.0
    return duration(1.0 / per_second) if per_second else None
