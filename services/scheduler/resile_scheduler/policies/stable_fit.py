"""A throughput that stays the same while its measurements only jitter."""

from collections import Counter
from math import isfinite

import numpy as np

from .throughput import MOST_MEASUREMENTS, Configuration, Measurement, Measurements, Throughput

TOLERANCE = 0.3
"""Two medians of `MOST_MEASUREMENTS` iterations that jitter by 20 % hardly ever differ by this share."""


class StableFit:
    """The throughput of a job, fitted again only when there is something to learn.

    That is when 1, 2, 4, ... up to `MOST_MEASUREMENTS` measurements of a configuration (workers, batch, whether across
    hosts) are known, and then when their median is off by more than `TOLERANCE` from what it was in the last fit.
    """

    def __init__(
        self, num_shards: int | None = None, *, may_grow: bool = False, micro_batch_size: int | None = None
    ) -> None:
        self.throughput: Throughput | None = None
        self._measurements = Measurements(num_shards, may_grow, micro_batch_size)
        self._numbers: Counter[Configuration] = Counter()
        """How many measurements of each configuration there ever were."""
        self._fitted: dict[Configuration, float] = {}
        """The median seconds of an iteration in the last fit, by configuration."""

    def add(self, measurement: Measurement) -> None:
        """Take a measurement into account. A fit that is not finite is none: the one before stays."""
        self._measurements.add(measurement)
        self._numbers[measurement.configuration] += 1
        if self._is_news(measurement.configuration):
            with np.errstate(all="ignore"):
                newest = self._measurements.fit()
            self.throughput = newest if _is_finite(newest) else self.throughput
            self._fitted = self._measurements.medians()
            self._numbers = Counter({known: self._numbers[known] for known in self._fitted})

    def _is_news(self, configuration: Configuration) -> bool:
        known, number = self._fitted.get(configuration), self._numbers[configuration]
        if known is None or (number <= MOST_MEASUREMENTS and number & (number - 1) == 0):
            return True
        return abs(self._measurements.median(configuration) - known) > TOLERANCE * known


def _is_finite(throughput: Throughput) -> bool:
    lines = (throughput.compute, throughput.exchange, throughput.exchange_across)
    ends = (number for line in lines for number in (line.intercept, line.slope))
    errors = (error for correction in throughput.corrections for error in correction.errors)
    return all(map(isfinite, (*ends, *errors)))
