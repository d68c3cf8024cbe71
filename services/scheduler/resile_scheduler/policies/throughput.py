"""How fast a job trains with other workers or another batch: T(n, b) = b / (t_grad(b / n) + t_sync(n)).

t_grad, the time in which a worker computes its part of the batch, is a line over its samples. t_sync, the time of the
exchange, is 0 for one worker, and otherwise a line over n - 2: one for workers on one host, another across hosts (as in
A. Qiao et al., "Pollux", OSDI 2021, section 4.1).

Both are fitted to what iterations have measured by least squares, with a prior that decides what was not measured: that
the job scales perfectly. So a batch that was never changed has no fixed cost, and an exchange never seen takes no time,
until something else is seen. The covariance of the fit says how much of a prediction is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Configuration = tuple[int, int, bool]
"""Workers, batch, and whether across hosts."""

NOISE = 0.1
"""The standard deviation of one iteration's time, relative to it."""
MOST_ITERATIONS = 16
"""That count in one configuration: the newest."""
MOST_CONFIGURATIONS = 64
"""That count: the newest."""


@dataclass(frozen=True)
class Measurement:
    """One iteration: its workers, the hosts these were on, and the samples of its global batch.

    ``compute_seconds`` is the time of the slowest worker, ``exchange_seconds`` what the exchange took beyond it.
    """

    workers: int
    batch: int
    hosts: int
    compute_seconds: float
    exchange_seconds: float

    @property
    def configuration(self) -> Configuration:
        """What decides how long it takes."""
        return self.workers, self.batch, self.hosts > 1


@dataclass(frozen=True)
class Line:
    """``intercept + slope * x`` seconds, both at least 0, and the variances and the covariance of the two."""

    intercept: float = 0.0
    slope: float = 0.0
    intercept_variance: float = 0.0
    slope_variance: float = 0.0
    covariance: float = 0.0

    def at(self, x: Floats) -> Floats:
        """Return the seconds at ``x``."""
        return self.intercept + self.slope * x

    def variance_at(self, x: Floats) -> Floats:
        """Return the variance of the seconds at ``x``."""
        return self.intercept_variance + 2.0 * self.covariance * x + self.slope_variance * x**2


@dataclass(frozen=True)
class Throughput:
    """T(n, b) of one job. As it is by default, a job scales perfectly, in an unknown unit of time.

    With ``num_shards`` the slowest of n workers computes ceil(num_shards / n) of so many equal parts of the batch,
    otherwise the n-th part.
    """

    num_shards: int | None = None
    compute: Line = Line(slope=1.0)
    """Over the samples of a worker."""
    exchange: Line = Line()
    """Over the workers less 2, on one host."""
    exchange_across: Line = Line()
    """The same across hosts."""
    num_measured: int = 0
    """Configurations that were measured: 0 means that nothing is known."""

    def seconds(self, workers: ArrayLike, batch: ArrayLike, *, across: ArrayLike = False) -> Floats:
        """Return the seconds of an iteration; the arguments are broadcast. ``across``: on more than one host."""
        n = np.asarray(workers, dtype=float)
        exchange = np.where(across, self.exchange_across.at(n - 2.0), self.exchange.at(n - 2.0))
        return self.compute.at(self.samples(workers, batch)) + np.where(n > 1.0, exchange, 0.0)

    def seconds_of(self, workers: int, batch: int, *, across: bool = False) -> float:
        """Return `seconds` for one configuration, sooner."""
        line = self.exchange_across if across else self.exchange
        exchange = line.intercept + line.slope * (workers - 2) if workers > 1 else 0.0
        return self.compute.intercept + self.compute.slope * self._samples_of(workers, batch) + exchange

    def _samples_of(self, workers: int, batch: int) -> float:
        if self.num_shards is None:
            return batch / workers
        return -(-self.num_shards // workers) * (batch / self.num_shards)

    def rate(self, workers: ArrayLike, batch: ArrayLike, *, across: ArrayLike = False) -> Floats:
        """Return the samples per second; arguments as for `seconds`."""
        return np.asarray(batch, dtype=float) / self.seconds(workers, batch, across=across)

    def uncertainty(self, workers: ArrayLike, batch: ArrayLike, *, across: ArrayLike = False) -> Floats:
        """Return the standard deviation of `seconds`, relative to it; infinite if nothing was measured."""
        n, samples = np.asarray(workers, dtype=float), self.samples(workers, batch)
        if not self.num_measured:
            return np.full_like(samples, inf)
        exchange = np.where(across, self.exchange_across.variance_at(n - 2.0), self.exchange.variance_at(n - 2.0))
        variance = self.compute.variance_at(samples) + np.where(n > 1.0, exchange, 0.0)
        return np.sqrt(np.maximum(variance, 0.0)) / self.seconds(workers, batch, across=across)

    def samples(self, workers: ArrayLike, batch: ArrayLike) -> Floats:
        """Return the samples of the batch that the slowest worker computes."""
        n, b = np.asarray(workers, dtype=float), np.asarray(batch, dtype=float)
        return b / n if self.num_shards is None else np.ceil(self.num_shards / n) * (b / self.num_shards)


@dataclass
class Measurements:
    """The newest iterations of a job, by configuration: workers, batch, and whether across hosts."""

    num_shards: int | None = None
    _times: dict[Configuration, list[tuple[float, float]]] = field(default_factory=dict)
    """Compute and exchange seconds; the configuration measured last comes last."""

    def add(self, measurement: Measurement) -> None:
        """Take one iteration into account; the oldest of many are forgotten."""
        key = measurement.configuration
        times = self._times.pop(key, [])
        self._times[key] = [*times, (measurement.compute_seconds, measurement.exchange_seconds)][-MOST_ITERATIONS:]
        if len(self._times) > MOST_CONFIGURATIONS:
            del self._times[next(iter(self._times))]

    def medians(self) -> dict[Configuration, float]:
        """Return the median seconds of an iteration in each configuration."""
        return {configuration: self.median(configuration) for configuration in self._times}

    def median(self, configuration: Configuration) -> float:
        """Return the median seconds of an iteration in one that was measured."""
        return median(computing + exchanging for computing, exchanging in self._times[configuration])

    def fit(self) -> Throughput:
        """Return the throughput that fits the medians of the configurations best, with the prior."""
        unfitted = Throughput(self.num_shards)
        if not self._times:
            return unfitted
        compute: list[_Row] = []
        exchange: dict[bool, list[_Row]] = {False: [], True: []}
        for (workers, batch, is_across), times in self._times.items():
            computing, exchanging = (median(seconds) for seconds in zip(*times, strict=True))
            deviation = NOISE * (computing + exchanging) / sqrt(len(times))
            compute.append(_Row(float(unfitted.samples(workers, batch)), computing, deviation))
            if workers > 1:
                exchange[is_across].append(_Row(workers - 2.0, exchanging, deviation))
        typical = median(row.seconds for row in compute)
        inside = _fit(exchange[False], Line(), intercept_deviation=typical, slope_deviation=typical / 10)
        across = _fit(exchange[True], inside, intercept_deviation=typical, slope_deviation=typical / 10)
        line = _fit(compute, Line(), intercept_deviation=typical, slope_deviation=inf)
        return Throughput(self.num_shards, line, inside, across, len(self._times))


class _Row(NamedTuple):
    x: float
    seconds: float
    deviation: float
    """The standard deviation of ``seconds``."""


def _fit(rows: Sequence[_Row], prior: Line, *, intercept_deviation: float, slope_deviation: float) -> Line:
    """Return the most likely line: normal errors, normal priors around ``prior``, nothing below 0.

    The variances are those without the bounds. They grow if the rows are further from the line than their deviations.
    """
    weights = [row.deviation**-2 for row in rows]
    weight_at_0 = intercept_deviation**-2
    weight = weight_at_0 + sum(weights)
    # Moments around the centre: sums of squares alone, so that nothing cancels.
    centre = sum(w * row.x for w, row in zip(weights, rows, strict=True)) / weight
    mean = (weight_at_0 * prior.intercept + sum(w * row.seconds for w, row in zip(weights, rows, strict=True))) / weight
    spread = slope_deviation**-2 + weight_at_0 * centre**2
    spread += sum(w * (row.x - centre) ** 2 for w, row in zip(weights, rows, strict=True))
    moment = slope_deviation**-2 * prior.slope - weight_at_0 * centre * (prior.intercept - mean)
    moment += sum(w * (row.x - centre) * (row.seconds - mean) for w, row in zip(weights, rows, strict=True))
    slope = max(moment / spread, 0.0)
    intercept = mean - slope * centre
    if intercept < 0.0:
        intercept, slope = 0.0, (moment + weight * centre * mean) / (spread + weight * centre**2)
    errors = [w * (row.seconds - intercept - slope * row.x) ** 2 for w, row in zip(weights, rows, strict=True)]
    misfit = max(sum(errors) / len(errors), 1.0) if errors else 1.0
    return Line(
        intercept,
        slope,
        intercept_variance=misfit * (1.0 / weight + centre**2 / spread),
        slope_variance=misfit / spread,
        covariance=-misfit * centre / spread,
    )
