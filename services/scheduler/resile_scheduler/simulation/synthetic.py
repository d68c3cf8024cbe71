"""Workloads that are made up from a seed: jobs that arrive at random, compute-bound, balanced or communication-bound.

The load is the work that arrives, in slot-seconds on one slot at the least batch, over the slot-seconds that there are:
``low`` is 0.5, ``high`` 1.5, ``bursty`` 0.8 in three bursts.
"""

from collections.abc import Sequence

import numpy as np

from resile_shared.messages.jobs import JobSpec
from resile_shared.messages.reports import BatchRange

from .throughputs import Model, synthetic_models
from .training import Modelled
from .workload import CHECKPOINT_SECONDS, Submission, Workload

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
