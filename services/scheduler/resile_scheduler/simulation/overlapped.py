"""How long a step takes at sizes that were not measured: the model of Pollux, fitted to a job's own measurements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import ArrayLike

from resile_scheduler.policies.throughput import Floats, Line, Throughput

from .replay import Measurement

OVERLAPS = np.array([1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0])
LESS_OVERLAP = 1e-3
"""What speaks for less overlap among equal fits, in relative error."""
FARTHER = 1.1
"""How many times slower an exchange across nodes is at least, while only those within one were measured."""


@dataclass(frozen=True)
class OverlappedThroughput(Throughput):
    """A step takes (compute^o + exchange^o)^(1 / o) seconds, and what it computes is at most ``largest_local`` samples.

    A worker takes more in equal steps, and exchanges in the last. `compute` is over the samples of one step. What was
    measured corrects the lines for that number of workers: jobs do not scale as smoothly.
    """

    overlap: float = 1.0
    """1: compute and exchange follow each other; the larger, the more of the shorter one is hidden."""
    initial: int = 1
    """One worker alone takes a larger batch in two or more steps."""
    largest_local: int = 1
    errors: tuple[tuple[int, tuple[float, ...], tuple[float, ...]], ...] = ()
    """Numbers of workers that were measured; for each the logarithms of the samples of a step, rising, and of how many
    times as long it took as by the lines."""

    def seconds(self, workers: ArrayLike, batch: ArrayLike, *, across: ArrayLike = False) -> Floats:
        """Return the seconds of an iteration; arguments as for `Throughput.seconds`."""
        n, b = np.asarray(workers, dtype=float), np.asarray(batch, dtype=float)
        steps = np.maximum(np.ceil(b / n / self.largest_local - 1e-8), 1.0)
        steps = np.where((n == 1.0) & (b > self.initial), np.maximum(steps, 2.0), steps)
        samples = b / n / steps
        compute = self.compute.at(samples)
        more = np.maximum(n - 2.0, 0.0)
        exchange = np.where(across, self.exchange_across.at(more), self.exchange.at(more)) * (n > 1.0)
        last = (compute**self.overlap + exchange**self.overlap) ** (1.0 / self.overlap)
        by_lines = last + (steps - 1.0) * compute
        return np.asarray(by_lines * np.exp(self._errors(n, samples)))

    def seconds_of(self, workers: int, batch: int, *, across: bool = False) -> float:
        """Return `seconds` for one configuration."""
        return float(self.seconds(workers, batch, across=across))

    def rate(self, workers: ArrayLike, batch: ArrayLike, *, across: ArrayLike = False) -> Floats:
        """Return the samples per second; arguments as for `Throughput.seconds`."""
        return np.asarray(np.asarray(batch, dtype=float) / self.seconds(workers, batch, across=across))

    def _errors(self, workers: Floats, samples: Floats) -> Floats:
        """Return the logarithms of how far the lines are off: between two measurements linear, beyond constant."""
        n, logarithms = np.broadcast_arrays(workers, np.log(np.maximum(samples, 1e-9)))
        found = np.zeros(n.shape)
        for number, at, errors in self.errors:
            found = np.where(n == number, np.interp(logarithms, at, errors), found)
        return found


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
    return replace(found, errors=_errors(found, measurements))


def _errors(
    model: OverlappedThroughput, measurements: Sequence[Measurement]
) -> tuple[tuple[int, tuple[float, ...], tuple[float, ...]], ...]:
    """Return `OverlappedThroughput.errors`: of placements on other nodes the mean."""
    errors: dict[int, dict[int, list[float]]] = {}
    for num_nodes, num_workers, local, step, _ in measurements:
        if num_workers > 1:
            by_lines = float(model.seconds(num_workers, num_workers * local, across=num_nodes > 1))
            errors.setdefault(num_workers, {}).setdefault(local, []).append(math.log(step / by_lines))
    return tuple(
        (
            number,
            tuple(math.log(local) for local in sorted(found)),
            tuple(fmean(found[local]) for local in sorted(found)),
        )
        for number, found in sorted(errors.items())
    )


def _fit_compute(local: Floats, seconds: Floats) -> Line:
    """Of one local batch, half the time is taken to grow with it: so that larger ones are tried."""
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
