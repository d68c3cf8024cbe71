"""The figures by which simulations are compared."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .outcome import Outcome, slot_seconds
from .training import Training

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Figures:
    """What a policy made of a workload. Times are seconds; None: no job completed."""

    policy: str
    jobs: int
    completed: int
    dropped: int
    """The number of jobs that failed, were stopped, or could never run."""
    deadlines: int
    deadlines_met: int
    mean_seconds: float | None
    """The mean time from submission to completion."""
    median_seconds: float | None
    p99_seconds: float | None
    mean_wait_seconds: float | None
    """The mean time from submission to the first iteration, of the jobs that trained."""
    makespan_seconds: float
    """The time from the first submission to the end of the last job."""
    utilization: float
    """Slot-seconds in which workers trained, over those that the hosts had from the first submission on."""
    jain: float | None
    """Jain's index of what jobs got, each relative to its share: 1 if all got the same, 1/n if one got all."""
    fairness_median: float | None
    """Median finish-time fairness: completion time over that on an equal share. Above 1 the share was better."""
    fairness_worst: float | None
    changes: int
    """How often the slots of jobs that trained changed."""


def figures_of(outcome: Outcome) -> Figures:
    """Return the figures of one simulation."""
    jobs = outcome.jobs
    completed = [job for job in jobs if job.is_complete]
    times = np.array([job.seconds for job in completed], dtype=float)
    waits = np.array([job.wait for job in jobs if job.wait is not None])
    begin = min(job.submission.time for job in jobs)
    held = sum(slot_seconds(job.steps, end=outcome.end) for job in jobs)
    offered = slot_seconds(outcome.capacity, end=outcome.end) - slot_seconds(outcome.capacity, end=begin)
    fairness = finish_time_fairness(outcome)
    return Figures(
        policy=outcome.name,
        jobs=len(jobs),
        completed=len(completed),
        dropped=len(jobs) - len(completed),
        deadlines=sum(job.submission.deadline is not None for job in jobs),
        deadlines_met=sum(job.met_deadline for job in jobs),
        mean_seconds=_of(times, np.mean),
        median_seconds=_of(times, np.median),
        p99_seconds=_of(times, lambda values: np.quantile(values, 0.99)),
        mean_wait_seconds=_of(waits, np.mean),
        makespan_seconds=outcome.end - begin,
        utilization=held / offered if offered else 0.0,
        jain=_of(fairness, _jain),
        fairness_median=_of(fairness, np.median),
        fairness_worst=_of(fairness, np.max),
        changes=sum(job.num_changes for job in jobs),
    )


def _of(values: Floats, function: Callable[[Floats], object]) -> float | None:
    return float(function(values)) if len(values) else None  # type: ignore[arg-type]


def _jain(fairness: Floats) -> float:
    """Return the index of R. Jain et al., DEC-TR-301 (1984), of the jobs' speeds relative to those on their shares."""
    speeds = 1.0 / fairness
    return float(speeds.sum() ** 2 / (len(speeds) * (speeds**2).sum()))


def finish_time_fairness(outcome: Outcome) -> Floats:
    """Return each completed job's completion time over that on an equal share (K. Mahajan et al., NSDI 2020).

    The share is that of N jobs, where N is the mean number of jobs in the pool while it was there. On it the job trains
    without any change, from its submission on, with the batch that it begins with.
    """
    counts = _MeanNumber(outcome)
    found = []
    for job in outcome.jobs:
        if job.seconds is None or job.ended is None:
            continue
        submission = job.submission
        share = outcome.num_slots / counts.between(submission.time, job.ended)
        workers = min(int(share), submission.spec.max_workers, submission.training.num_shards)
        workers = max(1, submission.spec.min_workers, workers)
        alone = _seconds_alone(submission.training, workers, outcome.slots_per_host)
        found.append(job.seconds * min(share, 1.0) / alone)
    return np.array(found)


class _MeanNumber:
    """How many jobs there were at once."""

    def __init__(self, outcome: Outcome) -> None:
        begun = [(job.submission.time, 1) for job in outcome.jobs]
        ended = [(outcome.end if job.ended is None else job.ended, -1) for job in outcome.jobs]
        times, changes = np.array(sorted(begun + ended)).T
        numbers = np.cumsum(changes)
        self._times = times
        self._areas = np.append(0.0, np.cumsum(numbers[:-1] * np.diff(times)))

    def between(self, begin: float, end: float) -> float:
        """Return the mean from ``begin`` to ``end``."""
        low, high = np.interp([begin, end], self._times, self._areas)
        return max(float(high - low) / (end - begin), 1.0)


def _seconds_alone(training: Training, workers: int, slots_per_host: int) -> float:
    whole, rest = divmod(workers, slots_per_host)
    by_host = (rest,) * bool(rest) + (slots_per_host,) * whole
    done = seconds = 0.0
    while done < training.work:
        pace = training.pace(by_host, training.batch_size, done)
        seconds += (pace.until - done) / pace.work * pace.seconds
        done = pace.until
    return seconds
