"""How fair completion times are: each against what an equal share of the cluster would have given."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from resile_scheduler.simulation.arrivals import Arrival
from resile_scheduler.simulation.profiles import Application

from .replay import Cluster, Outcome

NUM_BATCHES = 12
"""How many batch sizes are tried in each epoch."""


def finish_time_fairness(
    arrivals: Sequence[Arrival], outcomes: Sequence[Outcome], cluster: Cluster, *, fixed: Mapping[str, int]
) -> list[float]:
    """Return each job's completion time over that on an equal share (K. Mahajan et al., "Themis", NSDI 2020).

    The share is that of N jobs, where N is the mean number of jobs in the cluster while it was there. On it the job
    trains without any change, from its submission on, with the batch that is best in each epoch. Above 1 a job would
    have been better off with its share. Applications in ``fixed`` have one worker and that batch.
    """
    begun = np.array([outcome.submitted for outcome in outcomes])
    ended = np.array([outcome.completed for outcome in outcomes])
    found = []
    for arrival, outcome in zip(arrivals, outcomes, strict=True):
        beside = np.minimum(ended, outcome.completed) - np.maximum(begun, outcome.submitted)
        num_jobs = float(np.maximum(beside, 0.0).sum()) / outcome.completion_time
        share = cluster.num_slots / num_jobs
        batch = fixed.get(arrival.application.name)
        workers = 1 if batch else max(1, min(int(share), _most_workers(arrival.application)))
        alone = _seconds_alone(arrival.application, workers, cluster.slots_per_node, batch)
        found.append(outcome.completion_time * min(share, 1.0) / alone)
    return found


@lru_cache
def _seconds_alone(application: Application, workers: int, slots_per_node: int, batch: int | None) -> float:
    whole, rest = divmod(workers, slots_per_node)
    placement = (rest,) * bool(rest) + (slots_per_node,) * whole
    least = max(application.initial_batch, application.smallest_local * workers)
    batches = [batch] if batch else np.geomspace(least, application.largest_batch, NUM_BATCHES)
    seconds = 0.0
    for epoch in range(application.num_epochs):
        speed = max(application.speed(placement, float(size), epoch) for size in batches)
        seconds += (application.progress_after(epoch + 1) - application.progress_after(epoch)) / speed
    return seconds


def _most_workers(application: Application) -> int:
    return application.largest_batch // application.smallest_local
