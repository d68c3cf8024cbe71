"""Reads what is to be simulated: a made-up load, a CSV workload, or the history of a pool."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from resile_shared.errors import UsageError
from resile_shared.messages.jobs import JobSpec
from resile_shared.messages.reports import BatchRange

from .history import read_history
from .tables import read_table
from .throughputs import Model, synthetic_models
from .training import Modelled
from .workload import CHECKPOINT_SECONDS, Submission, Workload, equal_hosts

DEFAULT_SLOTS = 40
SLOTS_PER_HOST = 8
MAX_SLOTS = 100_000


def read_trace(
    trace: str,
    *,
    num_slots: int | None = None,
    num_hosts: int | None = None,
    profiles: Path | None = None,
    hours: float = 4.0,
    seed: int = 0,
) -> Workload:
    """Return the workload that ``trace`` names, with its hosts.

    A history has hosts of its own; with ``num_slots`` or ``num_hosts`` it is simulated on equal hosts instead, as other
    workloads are. ``hours`` and ``seed`` are those of a made-up load.

    Raises:
        UsageError: there is no such trace, or no such pool.
        MalformedFile: the file, or a profile that it needs, cannot be read.

    """
    path = Path(trace)
    if trace not in LOADS and not path.is_file():
        raise UsageError(f"no trace {trace}: name a history (JSON), a workload (.csv), or {', '.join(LOADS)}")
    slots = num_slots or (num_hosts * SLOTS_PER_HOST if num_hosts else DEFAULT_SLOTS)
    if slots > MAX_SLOTS:
        raise UsageError(f"a pool of {slots} slots: at most {MAX_SLOTS} can be simulated")
    hosts = equal_hosts(slots, num_hosts or -(-slots // SLOTS_PER_HOST))
    if trace not in LOADS and path.suffix != ".csv":
        recorded = read_history(path)
        return recorded if num_slots is None and num_hosts is None else replace(recorded, hosts=hosts)
    if trace in LOADS:
        workload = synthetic(trace, num_slots=slots, hours=hours, seed=seed)
    else:
        workload = read_table(path, profiles=profiles, num_slots=slots)
    return replace(workload, hosts=hosts)


LOADS = {"low": 0.5, "high": 1.5, "bursty": 0.8}
GROWTH = 8
"""The ratio of the largest batch of a job to its least."""
MOST_WORKERS = 16
NUM_SHARDS = 24
MEAN_SECONDS = 3600.0
"""How long a job takes on one slot at its least batch, on average; the spread is lognormal."""
NUM_BURSTS = 3
BURST_SHARE = 0.05
"""The length of a burst, as a share of the whole time."""


def synthetic(load: str, *, num_slots: int, hours: float, seed: int) -> Workload:
    """Return the jobs that arrive in ``hours`` hours; ``load`` is one of `LOADS`."""
    rng = np.random.default_rng(seed)
    models = synthetic_models()
    horizon = hours * 3600.0
    num = max(1, round(LOADS[load] * num_slots * horizon / MEAN_SECONDS))
    times = _times(rng, num, horizon, in_bursts=load == "bursty")
    return Workload(tuple(_job(rng, models, number, time) for number, time in enumerate(times, 1)))


def _times(rng: np.random.Generator, num: int, horizon: float, *, in_bursts: bool) -> list[float]:
    if not in_bursts:
        return sorted(rng.uniform(0.0, horizon, num).tolist())
    begins = rng.choice(round(1 / BURST_SHARE), NUM_BURSTS, replace=False) * horizon * BURST_SHARE
    return sorted((rng.choice(begins, num) + rng.uniform(0.0, horizon * BURST_SHARE, num)).tolist())


def _job(rng: np.random.Generator, models: Sequence[Model], number: int, time: float) -> Submission:
    model = models[int(rng.integers(len(models)))]
    samples = float(model.throughput.rate(1, model.least_batch)) * MEAN_SECONDS * float(rng.lognormal(-0.5, 1.0))
    batches = BatchRange(least=model.least_batch, most=GROWTH * model.least_batch)
    spec = JobSpec(name=model.name, package="packages/1", script="train.py", max_workers=MOST_WORKERS)
    training = Modelled(samples, model.throughput, model.least_batch, NUM_SHARDS, batches)
    return Submission(time, f"job-{number}", spec, training, CHECKPOINT_SECONDS, bits="fast")
