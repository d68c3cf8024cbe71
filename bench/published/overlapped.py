"""How long a step takes at sizes that were not measured: the model of Pollux, fitted to a job's own measurements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import ArrayLike

from resile_scheduler.policies.throughput import ROUNDING, Correction, FixedWorkers, Floats, Line, Throughput

from .replay import Measurement

OVERLAPS = np.array([1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0])
LESS_OVERLAP = 1e-3
"""The penalty for overlap, in relative error: among equal fits the one with least overlap is chosen."""
FARTHER = 1.1
"""How many times slower an exchange across nodes is taken to be while only those within one were measured."""


@dataclass(frozen=True)
class OverlappedThroughput(Throughput):
    """Like `Throughput`, but a worker computes at most ``largest_local`` samples at once.

    It takes more in equal steps, and exchanges in the last. `compute` is over the samples of one step. Corrections for
    a number of workers are the same on one host and across hosts.
    """

    initial: int = 1
    """The initial batch: one worker alone takes a larger one in two or more steps."""
    largest_local: int = 1

    @property
    def is_linear(self) -> bool:
        """Whether it is linear in the batch: never, since it jumps wherever the number of steps changes."""
        return False

    def with_workers(self, workers: ArrayLike, *, across: ArrayLike = False) -> FixedWorkers:
        """Return the throughput with these numbers of workers, as a function of the batch."""
        return _FixedWorkers(*super().with_workers(workers, across=across))

    def seconds_of(self, workers: int, batch: int, *, across: bool = False) -> float:
        """Return `seconds` for one configuration."""
        return float(self.seconds(workers, batch, across=across))


class _FixedWorkers(FixedWorkers):
    """An `OverlappedThroughput` with given numbers of workers."""

    def seconds(self, batch: ArrayLike) -> Floats:
        """Return the seconds of an iteration."""
        of, n, b = self.throughput, self.workers, np.asarray(batch, dtype=float)
        assert isinstance(of, OverlappedThroughput)
        steps = np.maximum(np.ceil(b / n / of.largest_local - ROUNDING), 1.0)
        steps = np.where((n == 1.0) & (b > of.initial), np.maximum(steps, 2.0), steps)
        last, other = self.pass_seconds(b / n / steps)
        return np.asarray(last + (steps - 1.0) * other)


def fit(measurements: Sequence[Measurement], *, initial: int, largest_local: int) -> OverlappedThroughput:
    """Return the model closest to the measurements, of which there must be at least one; errors count relatively."""
    nodes, workers, local, step, sync = np.array(measurements, dtype=float).T
    compute_times = np.maximum(step - sync, 1e-9)
    compute = _fit_compute(local, compute_times)
    powers = OVERLAPS[:, None]
    exchange = np.maximum(step**powers - compute_times**powers, 0.0) ** (1 / powers)
    across = nodes > 1
    within = (workers > 1) & ~across
    more = np.maximum(workers - 2, 0.0)
    lines = []
    predicted = np.zeros_like(exchange)
    for group in (within, across):
        starts, slopes = _lines(more[group], exchange[:, group], step[group])
        lines.append((starts, slopes))
        predicted[:, group] = starts[:, None] + slopes[:, None] * more[group]
    times = (compute.at(local) ** powers + predicted**powers) ** (1 / powers)
    errors = np.sqrt((np.log(times / step) ** 2).mean(axis=1)) + LESS_OVERLAP * (OVERLAPS - 1) ** 2
    best = int(errors.argmin())
    within_line, across_line = (Line(float(starts[best]), float(slopes[best])) for starts, slopes in lines)
    if not across.any():
        across_line = Line(within_line.intercept * FARTHER, within_line.slope * FARTHER)
    found = OverlappedThroughput(
        compute=compute,
        exchange=within_line,
        exchange_across=across_line,
        num_measured=len(measurements),
        overlap=float(OVERLAPS[best]),
        initial=initial,
        largest_local=largest_local,
    )
    return replace(found, corrections=_corrections(found, measurements))


def _corrections(model: OverlappedThroughput, measurements: Sequence[Measurement]) -> tuple[Correction, ...]:
    """Return how far the lines are off with several workers: the mean of placements on one node and on more."""
    errors: dict[int, dict[int, list[float]]] = {}
    for num_nodes, num_workers, local, step, _ in measurements:
        if num_workers > 1:
            by_lines = float(model.seconds(num_workers, num_workers * local, across=num_nodes > 1))
            errors.setdefault(num_workers, {}).setdefault(local, []).append(math.log(step / by_lines))
    by_size = {n: sorted((math.log(local), fmean(of)) for local, of in found.items()) for n, found in errors.items()}
    return tuple(
        Correction(number, across, *zip(*found, strict=True))
        for number, found in sorted(by_size.items())
        for across in (False, True)
    )


def _fit_compute(local: Floats, seconds: Floats) -> Line:
    """Fit the computation. Half the time of a single local batch is taken to grow with it: so larger ones are tried."""
    if (local == local[0]).all():
        half = float(seconds.mean()) / 2
        return Line(half, half / float(local[0]))
    starts, slopes = _lines(local, seconds[None], seconds)
    return Line(float(starts[0]), float(slopes[0]))


def _lines(x: Floats, ys: Floats, scale: Floats) -> tuple[Floats, Floats]:
    """Return where lines start and their slopes, for each row of ``ys``.

    They are nowhere falling or negative, and have the least square errors relative to ``scale``.
    """
    if not len(x):
        return np.zeros(len(ys)), np.zeros(len(ys))
    weights = scale**-2.0
    weights /= weights.sum()
    mean_x, mean_y = weights @ x, ys @ weights
    spread = float(weights @ (x - mean_x) ** 2)
    covariance = (ys - mean_y[:, None]) @ (weights * (x - mean_x))
    slopes = np.maximum(covariance / spread, 0.0) if spread else np.zeros(len(ys))
    starts = mean_y - slopes * mean_x
    through_zero = ys @ (weights * x) / max(float(weights @ (x * x)), 1e-300)
    return np.maximum(starts, 0.0), np.where(starts < 0, through_zero, slopes)
