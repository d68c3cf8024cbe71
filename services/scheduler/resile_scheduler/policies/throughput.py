"""How fast a job trains with other workers or another batch: T(n, b) = b / t(n, b).

t_grad, the time in which a worker computes its part of the batch, is a line over its samples. t_sync, the time of the
exchange, is 0 for one worker, and otherwise a line over n - 2: one for workers on one host, another across hosts. As
part of the exchange is hidden behind the computation, an iteration takes (t_grad^o + t_sync^o)^(1/o), where o is at
least 1 (A. Qiao et al., "Pollux", OSDI 2021, section 4.1). A worker whose samples are too many for one pass, forward
and backward, computes them in several equal ones, of which only the last hides the exchange.

All of it is fitted to what iterations have measured, by least squares with a prior that decides what was not measured:
that the job scales perfectly. So an exchange never seen takes no time, until something else is seen. For a job whose
batch may change, half of the computation is taken to grow with the batch until two were measured, so that a larger one
is tried; for any other job all of it, so that more workers are tried.

Jobs do not scale as smoothly as lines. What was measured with a number of workers corrects the lines there, at the
samples of a pass with which it was measured: a larger one may need more memory than caches have.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, exp, inf, log
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Configuration = tuple[int, int, bool]
"""The number of workers, the batch, and whether the workers are across hosts."""

NOISE = 0.1
"""The standard deviation of one iteration's time, relative to it."""
MISFIT = 0.2
"""The standard deviation of what the lines predict for a number of workers, relative to it."""
MOST_ITERATIONS = 16
"""The most iterations that count in a configuration: more add no certainty, as machines change their speed."""
MOST_MEASUREMENTS = 16
"""Only the newest this many measurements of a configuration count."""
MOST_CONFIGURATIONS = 64
"""Only the newest this many configurations count."""
CERTAIN = 2.0
"""An error of the lines below this many standard deviations of the measured time is taken for noise: otherwise a job
would choose, among many numbers of workers, the one that noise makes fast."""
OVERLAPS = np.array([1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0])
LESS_OVERLAP = 1e-3
"""The penalty for overlap, in relative error: among equal fits the one with least overlap is chosen."""
FLAT = 1e-6
"""The standard deviation of an exchange's slope while it is not known, relative to the time of a typical pass."""
FIXED_SHARE = 0.5
"""The fixed share of the computation, until two batches were measured, of a job whose batch may change."""


@dataclass(frozen=True)
class Measurement:
    """Iterations: their workers, the hosts these were on, and the samples of the global batch.

    ``compute_seconds`` is the time of the slowest worker, ``exchange_seconds`` what the exchange took beyond it: the
    medians of ``iterations``.
    """

    workers: int
    batch: int
    hosts: int
    compute_seconds: float
    exchange_seconds: float
    iterations: int = 1

    @property
    def configuration(self) -> Configuration:
        """The configuration, which decides how long an iteration takes."""
        return self.workers, self.batch, self.hosts > 1


@dataclass(frozen=True)
class Line:
    """``intercept + slope * x`` seconds, both at least 0."""

    intercept: float = 0.0
    slope: float = 0.0

    def at(self, x: Floats) -> Floats:
        """Return the seconds at ``x``."""
        return self.intercept + self.slope * x


class Correction(NamedTuple):
    """How far the lines are off with ``workers`` workers.

    Between two measured numbers of samples this is linear in their logarithm, beyond them constant.
    """

    workers: int
    across: bool
    samples: tuple[float, ...]
    """Logarithms of the samples of a pass of the slowest worker, rising."""
    errors: tuple[float, ...]
    """Logarithms of the ratios of the measured time of an iteration to that by the lines."""


@dataclass(frozen=True)
class Throughput:
    """T(n, b) of one job. As it is by default, a job scales perfectly, in an unknown unit of time.

    With ``num_shards`` the slowest of n workers computes ceil(num_shards / n) of the equal parts of the batch,
    otherwise the n-th part.
    """

    num_shards: int | None = None
    compute: Line = Line(slope=1.0)
    """The seconds of the computation of one pass, over its samples."""
    exchange: Line = Line()
    """The seconds of the exchange on one host, over the number of workers less 2."""
    exchange_across: Line = Line()
    """The seconds of the exchange across hosts, over the number of workers less 2."""
    num_measured: int = 0
    """How many configurations were measured; 0 means that nothing is known."""
    overlap: float = 1.0
    """The exponent o. 1: computation and exchange follow each other; the larger, the more of the shorter is hidden."""
    corrections: tuple[Correction, ...] = ()
    micro_batch_size: int | None = None
    """The most samples of one pass, of a job without ``num_shards``; None: a worker computes its part in one pass."""

    @property
    def is_linear(self) -> bool:
        """Whether the seconds of an iteration are linear in the batch, while the number of passes is the same."""
        return self.overlap == 1.0 and not self.corrections

    def seconds(self, workers: ArrayLike, batch: ArrayLike, *, across: ArrayLike = False) -> Floats:
        """Return the seconds of an iteration; the arguments are broadcast. ``across``: on more than one host."""
        return self.with_workers(workers, across=across).seconds(batch)

    def with_workers(self, workers: ArrayLike, *, across: ArrayLike = False) -> "FixedWorkers":
        """Return the throughput with these numbers of workers, as a function of the batch."""
        n = np.asarray(workers, dtype=float)
        more = n - 2.0
        exchange = np.where(across, self.exchange_across.at(more), self.exchange.at(more)) * (n > 1.0)
        return FixedWorkers(self, n, across, exchange)

    def seconds_of(self, workers: int, batch: int, *, across: bool = False) -> float:
        """Return `seconds` for one configuration, but faster."""
        line = self.exchange_across if across else self.exchange
        exchange = line.intercept + line.slope * (workers - 2) if workers > 1 else 0.0
        samples, passes = self._samples_of(workers, batch), 1
        if self.micro_batch_size is not None:
            passes = max(ceil(samples / self.micro_batch_size - ROUNDING), 1)
            samples /= passes
        compute = self.compute.intercept + self.compute.slope * samples
        seconds: float = (compute**self.overlap + exchange**self.overlap) ** (1.0 / self.overlap)
        seconds += (passes - 1) * compute
        for number, is_across, known, errors in self.corrections:
            if number == workers and is_across == across:
                return seconds * exp(np.interp(log(samples), known, errors))
        return seconds

    def _samples_of(self, workers: int, batch: int) -> float:
        if self.num_shards is None:
            return batch / workers
        return -(-self.num_shards // workers) * (batch / self.num_shards)

    def rate(self, workers: ArrayLike, batch: ArrayLike, *, across: ArrayLike = False) -> Floats:
        """Return the samples per second; arguments as for `seconds`."""
        return self.with_workers(workers, across=across).rate(batch)

    def samples(self, workers: ArrayLike, batch: ArrayLike) -> Floats:
        """Return the samples of the batch that the slowest worker computes."""
        n, b = np.asarray(workers, dtype=float), np.asarray(batch, dtype=float)
        return b / n if self.num_shards is None else np.ceil(self.num_shards / n) * (b / self.num_shards)

    def passes(self, workers: ArrayLike, batch: ArrayLike) -> tuple[Floats | float, Floats]:
        """Return in how many passes the slowest worker computes its samples, and the samples of each."""
        samples = self.samples(workers, batch)
        if self.micro_batch_size is None:
            return 1.0, samples
        number = np.maximum(np.ceil(samples / self.micro_batch_size - ROUNDING), 1.0)
        return number, samples / number


class FixedWorkers(NamedTuple):
    """A throughput with given numbers of workers. The batch is broadcast to these."""

    throughput: Throughput
    workers: Floats
    across: ArrayLike
    exchange: Floats
    """Seconds of the exchange."""

    def seconds(self, batch: ArrayLike) -> Floats:
        """Return the seconds of an iteration."""
        passes, samples = self.throughput.passes(self.workers, batch)
        last, other = self.pass_seconds(samples)
        return last if self.throughput.micro_batch_size is None else last + (passes - 1.0) * other

    def pass_seconds(self, samples: Floats) -> tuple[Floats, Floats]:
        """Return the seconds of the last pass of an iteration, with its exchange, and of each pass before it."""
        of = self.throughput
        compute = of.compute.at(samples)
        if of.overlap == 1.0:
            last = compute + self.exchange
        else:
            last = (compute**of.overlap + self.exchange**of.overlap) ** (1.0 / of.overlap)
        if not of.corrections:
            return last, compute
        factors = self._factors(samples)
        return last * factors, compute * factors

    def rate(self, batch: ArrayLike) -> Floats:
        """Return the samples per second."""
        return np.asarray(batch, dtype=float) / self.seconds(batch)

    def _factors(self, samples: Floats) -> Floats:
        n, where, x = np.broadcast_arrays(self.workers, self.across, np.log(samples))
        errors = np.zeros(n.shape)
        for number, is_across, known, measured in self.throughput.corrections:
            here = (n == number) & (where == is_across)
            errors[here] = np.interp(x[here], known, measured)
        return np.exp(errors)


@dataclass
class Measurements:
    """The newest measurements of a job, by configuration: workers, batch, and whether across hosts.

    ``may_grow``: whether its batch may change. ``micro_batch_size``: see `Throughput`.
    """

    num_shards: int | None = None
    may_grow: bool = False
    micro_batch_size: int | None = None
    _newest: dict[Configuration, list[Measurement]] = field(default_factory=dict)
    """The newest measurements by configuration; the configuration measured last comes last."""
    _medians: dict[Configuration, "_Median"] = field(default_factory=dict)
    """The medians of these measurements, in the same order."""

    def add(self, measurement: Measurement) -> None:
        """Take a measurement into account; the oldest of many are forgotten."""
        key = measurement.configuration
        newest = [*self._newest.pop(key, ()), measurement][-MOST_MEASUREMENTS:]
        self._medians.pop(key, None)
        self._newest[key], self._medians[key] = newest, _Median.of(newest)
        if len(self._newest) > MOST_CONFIGURATIONS:
            oldest = next(iter(self._newest))
            del self._newest[oldest], self._medians[oldest]

    def medians(self) -> dict[Configuration, float]:
        """Return the median seconds of an iteration in each configuration."""
        return {configuration: found.seconds for configuration, found in self._medians.items()}

    def median(self, configuration: Configuration) -> float:
        """Return the median seconds of an iteration in a measured configuration."""
        return self._medians[configuration].seconds

    def fit(self) -> Throughput:
        """Return the throughput that fits the medians of the configurations best, with the prior."""
        unfitted = Throughput(self.num_shards, micro_batch_size=self.micro_batch_size)
        if not self._medians:
            return unfitted
        columns = np.array([(*key, *of[:3]) for key, of in self._medians.items()]).T
        n, batches, far, compute, exchange, counts = columns
        across = far > 0.0
        passes, samples = unfitted.passes(n, batches)
        compute, exchange = np.maximum(compute / passes, SHORTEST), np.maximum(exchange, 0.0)
        last = compute + exchange
        weights = counts / (NOISE * last) ** 2
        typical = float(np.median(compute))
        fixed = FIXED_SHARE * typical if self.may_grow else 0.0
        starts, slopes = _lines(samples, compute[None], weights, prior=(fixed, 0.0), deviations=(typical, inf))
        fitted = replace(unfitted, compute=Line(float(starts[0]), float(slopes[0])), num_measured=len(counts))
        if (n > 1).any():
            fitted = _with_exchange(fitted, _Rows(n, samples, across, last, compute, weights), typical)
        errors = np.log((last + (passes - 1.0) * compute) / fitted.seconds(n, batches, across=across))
        return replace(fitted, corrections=_corrections(n, across, samples, errors, counts))


SHORTEST = 1e-9
"""The shortest computation of a pass, in seconds."""
ROUNDING = 1e-8
"""What rounding may add to a number of passes."""


class _Median(NamedTuple):
    """The median seconds in one configuration."""

    compute: float
    exchange: float
    iterations: int
    seconds: float
    """The median seconds of computation and exchange together."""

    @classmethod
    def of(cls, measurements: Sequence[Measurement]) -> "_Median":
        return cls(
            median(one.compute_seconds for one in measurements),
            median(one.exchange_seconds for one in measurements),
            min(sum(one.iterations for one in measurements), MOST_ITERATIONS),
            median(one.compute_seconds + one.exchange_seconds for one in measurements),
        )


class _Rows(NamedTuple):
    """What was measured, by configuration."""

    workers: Floats
    samples: Floats
    """The samples of a pass."""
    across: NDArray[np.bool_]
    last: Floats
    """Seconds of the last pass, with the part of the exchange that is not hidden behind it."""
    compute: Floats
    """Seconds of a pass."""
    weights: Floats


def _with_exchange(fitted: Throughput, rows: _Rows, typical: float) -> Throughput:
    """Return ``fitted`` with the exchange, and with the overlap for which all together is closest to ``rows``."""
    powers = OVERLAPS[:, None]
    exchange = np.asarray(rows.last * (1.0 - (rows.compute / rows.last) ** powers) ** (1.0 / powers), dtype=np.float64)
    more = rows.workers - 2.0
    several = rows.workers > 1
    inside, across = several & ~rows.across, several & rows.across
    flat = np.zeros(len(OVERLAPS))
    lines, found = (flat, flat), []
    for group in (inside, across):
        if group.any():
            # One number of workers does not tell how the exchange grows, on one host or across.
            steepness = typical / 10 if np.ptp(more[group]) else FLAT * typical
            prior, deviations = (lines[0], flat), (typical, steepness)
            lines = _lines(more[group], exchange[:, group], rows.weights[group], prior=prior, deviations=deviations)
        found.append(lines)
    (starts, slopes), (far_starts, far_slopes) = found
    exchange = np.where(across, _at(far_starts, far_slopes, more), _at(starts, slopes, more)) * several
    compute = fitted.compute.at(rows.samples)
    seconds = (compute**powers + exchange**powers) ** (1.0 / powers)
    errors = np.sqrt((np.log(seconds / rows.last) ** 2).mean(axis=1)) + LESS_OVERLAP * (OVERLAPS - 1.0) ** 2
    best = int(errors.argmin())
    return replace(
        fitted,
        exchange=Line(float(starts[best]), float(slopes[best])),
        exchange_across=Line(float(far_starts[best]), float(far_slopes[best])),
        overlap=float(OVERLAPS[best]),
    )


def _at(starts: Floats, slopes: Floats, x: Floats) -> Floats:
    return starts[:, None] + slopes[:, None] * x


def _corrections(
    workers: Floats, across: NDArray[np.bool_], samples: Floats, errors: Floats, counts: Floats
) -> tuple[Correction, ...]:
    """Return what makes up for ``errors``, the logarithms of how far lines are off, as far as they are not noise."""
    errors = errors * counts / (counts + (NOISE / MISFIT) ** 2)
    errors = np.where(np.abs(errors) < CERTAIN * NOISE / np.sqrt(counts), 0.0, errors)
    columns = workers.tolist(), across.tolist(), np.log(samples).tolist(), errors.tolist()
    found: dict[tuple[int, bool], dict[float, list[float]]] = {}
    for number, is_across, x, error in zip(*columns, strict=True):
        found.setdefault((int(number), is_across), {}).setdefault(x, []).append(error)
    return tuple(
        Correction(*key, *zip(*sorted((x, fmean(of)) for x, of in by_samples.items()), strict=True))
        for key, by_samples in sorted(found.items())
        if any(map(any, by_samples.values()))
    )


def _lines(
    x: Floats,
    ys: Floats,
    weights: Floats,
    *,
    prior: tuple[Floats | float, Floats | float],
    deviations: tuple[float, float],
) -> tuple[Floats, Floats]:
    """Return intercepts and slopes of the most likely lines through each row of ``ys``, none of them below 0.

    ``weights`` are the inverse variances of the values, ``prior`` the expected intercept and slope, ``deviations`` the
    standard deviations of these.
    """
    at_0, per_slope = deviations[0] ** -2, deviations[1] ** -2
    weight = at_0 + weights.sum()
    # Moments around the centre: sums of squares alone, so that nothing cancels.
    centre = float(weights @ x) / weight
    means = (at_0 * np.asarray(prior[0]) + ys @ weights) / weight
    spread = per_slope + at_0 * centre**2 + float(weights @ (x - centre) ** 2)
    moments = per_slope * np.asarray(prior[1]) - at_0 * centre * (prior[0] - means)
    moments = moments + (ys - means[:, None]) @ (weights * (x - centre))
    slopes = np.maximum(moments / spread, 0.0)
    starts = means - slopes * centre
    through_0 = (moments + weight * centre * means) / (spread + weight * centre**2)
    return np.maximum(starts, 0.0), np.where(starts < 0.0, through_0, slopes)
