"""What simulated jobs train, and how fast.

Each kind of `Training` says how long an iteration takes on given workers with a given batch, and how much of the job's
work it does. Work is counted in a unit of its own: iterations, samples, or progress.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple, Protocol

import numpy as np

from resile_shared.messages.reports import BatchRange

from ..policies.throughput import Throughput
from .profiles import Application

WorkersByHost = tuple[int, ...]
"""How many workers of a job there are on each of its hosts, in rising order."""


class Pace(NamedTuple):
    """How a job trains with its workers and its batch. Times are seconds of an iteration."""

    seconds: float
    work: float
    """The work that an iteration does."""
    until: float
    """The work that is done when the pace changes, or the job is complete."""
    exchange_seconds: float = 0.0
    """The part of ``seconds`` that the exchange takes."""
    noise_scale: float | None = None
    """The noise scale of the gradient, in samples; None: it is not measured."""


class Training(Protocol):
    """What a job trains, as its workers report it at their training call, and its ``work`` in all."""

    @property
    def work(self) -> float:
        """All that has to be done."""
        ...

    @property
    def iterations_total(self) -> int:
        """The number of iterations at the batch size that it begins with."""
        ...

    @property
    def num_shards(self) -> int:
        """The most workers that can take part."""
        ...

    @property
    def batch_size(self) -> int:
        """The global batch that it begins with, in samples."""
        ...

    @property
    def batch_range(self) -> BatchRange | None:
        """The batches with which it may train; None: only the one that it begins with."""
        ...

    @property
    def micro_batch_size(self) -> int | None:
        """The most samples that a worker computes in one pass; None: any number."""
        ...

    def pace(self, workers: WorkersByHost, batch_size: int, done: float) -> Pace:
        """Return the pace once ``done`` work is done."""
        ...


MOST_DAYS = 366
"""The most days that a job may take on its most workers: the simulated scheduler looks at it every 30 seconds."""


def too_long(training: Training, workers: int) -> str:
    """Return how long it takes on ``workers`` workers of a host, at its first pace, if that is too long to simulate."""
    pace = training.pace((workers,), training.batch_size, 0.0)
    days = training.work / pace.work * pace.seconds / 86400
    if days <= MOST_DAYS:
        return ""
    return f"on {workers} workers it takes {days:.3g} days: at most {MOST_DAYS} are simulated"


@dataclass(frozen=True)
class Sharded:
    """Iterations that take ``shard_seconds`` for each shard of the worker that has most; an exchange takes no time."""

    iterations_total: int
    num_shards: int = 24
    shard_seconds: float = 0.01
    batch_range = None
    micro_batch_size = None

    @property
    def work(self) -> float:
        """All that has to be done, in iterations."""
        return self.iterations_total

    @property
    def batch_size(self) -> int:
        """Eight samples in each shard."""
        return self.num_shards * 8

    def pace(self, workers: WorkersByHost, batch_size: int, done: float) -> Pace:
        """Return the same pace for any batch."""
        return Pace(ceil(self.num_shards / sum(workers)) * self.shard_seconds, 1.0, self.work)


@dataclass(frozen=True)
class Recorded:
    """Iterations that took ``seconds``, by number of workers, when they were recorded.

    Other numbers of workers are taken to need, for an iteration, a fixed time and one for each shard of the worker that
    has most, as fits what was recorded best; if that was one number of workers alone, there is no fixed time.
    """

    iterations_total: int
    num_shards: int
    seconds: Mapping[int, float]
    batch_range = None
    micro_batch_size = None

    @property
    def work(self) -> float:
        """All that has to be done, in iterations."""
        return self.iterations_total

    @property
    def batch_size(self) -> int:
        """A sample in each shard: histories do not have the batch."""
        return self.num_shards

    def pace(self, workers: WorkersByHost, batch_size: int, done: float) -> Pace:
        """Return the pace that was recorded, or the one that fits."""
        number = sum(workers)
        fixed, per_shard = self._line
        return Pace(self.seconds.get(number) or fixed + per_shard * self._shards(number), 1.0, self.work)

    def _shards(self, workers: int) -> int:
        return ceil(self.num_shards / workers)

    @cached_property
    def _line(self) -> tuple[float, float]:
        """The fixed time, and that of a shard."""
        shards = np.array([self._shards(workers) for workers in self.seconds], dtype=float)
        times = np.array(list(self.seconds.values()))
        if len(set(shards)) > 1:
            per_shard, fixed = np.polyfit(shards, times, 1)
            if per_shard > 0 and fixed >= 0:
                return float(fixed), float(per_shard)
        return 0.0, float((times / shards).mean())


@dataclass(frozen=True)
class Modelled:
    """A number of samples, at the speed of a throughput model."""

    samples: float
    throughput: Throughput
    batch_size: int
    num_shards: int
    batch_range: BatchRange | None = None

    @property
    def work(self) -> float:
        """All that has to be done, in samples."""
        return self.samples

    @property
    def micro_batch_size(self) -> int | None:
        """The micro batch size of the throughput."""
        return self.throughput.micro_batch_size

    @property
    def iterations_total(self) -> int:
        """The number of iterations at the batch size that it begins with."""
        return ceil(self.samples / self.batch_size)

    def pace(self, workers: WorkersByHost, batch_size: int, done: float) -> Pace:
        """Return the pace by the model."""
        number, across = sum(workers), len(workers) > 1
        seconds = float(self.throughput.seconds(number, batch_size, across=across))
        passes, samples = self.throughput.passes(number, batch_size)
        compute = float(passes * self.throughput.compute.at(samples))
        return Pace(seconds, batch_size, self.samples, exchange_seconds=max(seconds - compute, 0.0))


@dataclass(frozen=True)
class Profiled:
    """All epochs of a profiled application. A larger batch is worth less progress per sample, as was measured."""

    application: Application
    batch_size: int
    is_fixed: bool = False
    """Whether the batch stays as it is."""

    @property
    def work(self) -> float:
        """All that has to be done, in iterations with the smallest batch."""
        return self.application.progress_after(self.application.num_epochs)

    @property
    def iterations_total(self) -> int:
        """The number of iterations at the batch size that it begins with, as far as the first epoch tells."""
        pace = self.pace((1,), self.batch_size, 0.0)
        return ceil(self.work / pace.work)

    @property
    def num_shards(self) -> int:
        """As many workers as the largest batch gives work to."""
        return self.application.largest_batch // self.application.smallest_local

    @property
    def batch_range(self) -> BatchRange | None:
        """The range of the batches that were measured."""
        application = self.application
        if self.is_fixed:
            return None
        return BatchRange(
            least=application.initial_batch,
            most=application.largest_batch,
            least_per_slot=application.smallest_local,
        )

    @property
    def micro_batch_size(self) -> int:
        """The largest local batch of the profile."""
        return self.application.largest_local

    def pace(self, workers: WorkersByHost, batch_size: int, done: float) -> Pace:
        """Return the pace to the end of the epoch. Fewer samples than were measured take as long as the fewest."""
        application, number = self.application, sum(workers)
        epoch = application.epoch_at(done)
        local, steps = application.split(batch_size, number)
        batch = number * local * (steps + 1)
        step, sync = application.step_times(workers, max(local, application.smallest_local))
        squared, variance = application.gradient(batch, epoch)
        return Pace(
            seconds=step + steps * (step - sync),
            work=application.gain(batch, epoch),
            until=application.progress_after(epoch + 1),
            exchange_seconds=min(sync, step),
            noise_scale=variance / squared * application.initial_batch if squared else None,
        )
