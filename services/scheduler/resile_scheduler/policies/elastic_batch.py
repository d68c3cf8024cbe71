"""Slots and batch sizes together: the sum of all jobs' scaling factors is largest (V. Saxena et al., arXiv:2006.13878).

A larger batch makes the same exchange serve more samples, so a job whose batch may grow scales further. For each number
of workers n that a job may have, b*(n) is its best batch, within its range. Its scaling factor
T(n, b*(n)) / T(n_min, b_min) says how many times as fast it is as on the fewest slots on which it could train.
`solver` shares the slots so that the sum of these is largest, each weighted by the job's priority.

Arrivals are admitted one at a time, after the jobs that hold slots, as long as the minimums of all fit; the others
wait. A slot that makes no job faster stays idle. A job that was not measured is taken to scale perfectly. Another
number of workers than a job has is worth less by the training that the change costs, and by `LEAST_GAIN` at least.
With as many as it has it keeps its batch, unless the best one is quite different.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .changes import lost_share
from .deadlines import with_needed
from .demand import BatchRange, Demand, Target
from .newest import newest
from .ranking import in_turn
from .shares import admit, targets, what_leaves_fewer
from .solver import Curve, Ints, solve
from .throughput import ROUNDING, FixedWorkers, Floats, Throughput

ENOUGH = 0.99
"""The best batch is the smallest with this much of the highest throughput: a larger one learns less per sample."""
SAME_BATCH = 2.0
"""A batch that differs by no more than this factor is not worth a change of its own."""
LEAST_GAIN = 0.05
"""A change of workers must promise at least this part of the job's present speed, or half of what one more worker would
add if that is less: speeds with other numbers of workers are not known more precisely."""
NUM_HALVINGS = 8
"""Steps of the search for a batch: each replaces the ratio of its bounds by the square root."""

UNKNOWN_BATCH = BatchRange(1, 1, least_per_slot=0)
"""The batch of a job whose script has not reached the training call: any number of workers can share it."""


def elastic_batch(demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
    """Workers and batches for the largest sum of scaling factors."""
    demands = with_needed(demands, num_slots)
    wishes = {demand.job: _wish(demand) for demand in demands}
    able = [wish.able for wish in wishes.values() if wish.able]
    admitted = admit(able, num_slots, key=in_turn(demands))
    curves = [wishes[demand.job].curve for demand in admitted]
    shares = dict(zip((d.job for d in admitted), solve(curves, num_slots), strict=True))
    others = [demand for demand in demands if demand.job not in shares]
    given = targets(others, shares, num_slots, waiting=what_leaves_fewer(demands))
    for demand in demands:
        if demand.job in shares:
            given[demand.job] = _steady(demand, wishes[demand.job].options.target(demand, shares[demand.job]))
        elif not wishes[demand.job].able:
            given[demand.job] = Target(0, _impossible(demand))
    return {demand.job: given[demand.job] for demand in demands}


def _steady(demand: Demand, target: Target) -> Target:
    """Return the target with the present batch, if only the batch would change, and only a little."""
    present, best = demand.batch_size, target.batch_size
    if target.workers == demand.assigned_workers and present and best and present != best:
        is_same = max(present, best) <= SAME_BATCH * min(present, best)
        return replace(target, batch_size=present) if is_same else target
    return target


@dataclass(frozen=True, eq=False)
class _Options:
    """What a job may have: numbers of workers in rising order, and for each the best batch and the scaling factor."""

    sizes: Ints
    batches: Ints
    scaling: Floats
    fewest: int
    """The number of workers whose scaling factor with the least batch is 1; it may be less than the job's minimum."""
    is_measured: bool
    known_targets: dict[tuple[int, int | None], Target] = field(default_factory=dict)
    """Targets by workers and least batch, kept since most jobs have the same as in the decision before."""

    def worth(self, demand: Demand) -> Floats:
        """Return the scaling factors; those of other numbers of workers than at present lack the cost of a change."""
        if not demand.assigned_workers or not demand.change_seconds:
            return self.scaling
        present = int(self.sizes.searchsorted(demand.assigned_workers))
        if present == len(self.sizes) or self.sizes[present] != demand.assigned_workers:
            return self.scaling
        least_gain = min(LEAST_GAIN, 0.5 / demand.assigned_workers)
        worth: Floats = self.scaling - max(lost_share(demand), least_gain) * self.scaling[present]
        worth[present] = self.scaling[present]
        return worth

    def target(self, demand: Demand, workers: int) -> Target:
        """Return ``workers`` with their batch, and why."""
        least = None if demand.batch is None else demand.batch.least
        if (workers, least) not in self.known_targets:
            self.known_targets[workers, least] = self._target(workers, least)
        return self.known_targets[workers, least]

    def _target(self, workers: int, least_batch: int | None) -> Target:
        index = int(self.sizes.searchsorted(workers))
        speed = f"{self.scaling[index]:.1f} times as fast as on {self.fewest} slot{'s' if self.fewest > 1 else ''}"
        if least_batch is not None:
            speed += f" with a batch of {least_batch}"
        if not self.is_measured:
            speed = f"expected to be {speed}"
        batch = int(self.batches[index]) if least_batch is not None else None
        if workers == self.sizes[-1]:
            return Target(workers, f"all it can use: {speed}", batch_size=batch)
        return Target(workers, f"{speed}: all jobs together gain most this way", batch_size=batch)


class _Wish(NamedTuple):
    """What a job may have, and what that is worth."""

    options: _Options
    able: Demand | None
    """The demand with its least possible size as its minimum; None: no size is possible."""
    curve: Curve


@newest
def _wish(demand: Demand) -> _Wish:
    options = _options_of(demand)
    curve = Curve(options.sizes, demand.priority * options.worth(demand))
    if not len(options.sizes):
        return _Wish(options, None, curve)
    least = int(options.sizes[0])
    return _Wish(options, demand if least == demand.least else replace(demand, least=least), curve)


def _options_of(demand: Demand) -> _Options:
    throughput = demand.throughput or Throughput(num_shards=demand.num_shards)
    fixed = BatchRange(demand.batch_size, demand.batch_size) if demand.batch_size else UNKNOWN_BATCH
    return _options(throughput, demand.batch or fixed, demand.least, demand.most, demand.sizes, demand.slots_per_host)


@lru_cache(maxsize=16384)
def _options(
    throughput: Throughput,
    batches: BatchRange,
    least: int,
    most: int,
    allowed: tuple[int, ...] | None,
    slots_per_host: int | None,
) -> _Options:
    shapes = _shapes(batches, most, allowed, throughput.micro_batch_size)
    sizes = shapes.sizes
    across = sizes > (slots_per_host or most)
    speeds = throughput.with_workers(sizes, across=across)
    best = _smallest_enough(speeds, shapes)
    scaling, fewest = speeds.rate(best), 0
    if len(sizes):
        fewest, least_batch = int(sizes[0]), int(shapes.smallest[0])
        scaling *= throughput.seconds_of(fewest, least_batch, across=bool(across[0])) / least_batch
    enough = slice(int(sizes.searchsorted(least)), None)
    return _Options(sizes[enough], best[enough], scaling[enough], fewest, throughput.num_measured > 0)


class _Shapes(NamedTuple):
    """The numbers of workers that can share a batch, in rising order, and what that means whatever their speed."""

    sizes: Ints
    smallest: Ints
    """The least batch that each number of workers can share."""
    largest: Ints
    full: Ints
    """The batch of one full pass of all workers."""
    few: Ints
    """How many passes the least batch takes."""
    many: Ints
    """How many passes the largest batch takes."""


@lru_cache(maxsize=4096)
def _shapes(batches: BatchRange, most: int, allowed: tuple[int, ...] | None, micro_batch_size: int | None) -> _Shapes:
    sizes = np.arange(1, most + 1) if allowed is None else np.array(allowed, dtype=np.int64)
    sizes = sizes[(sizes >= 1) & (sizes <= most)]
    smallest = np.maximum(batches.least, batches.least_per_slot * sizes)
    sizes, smallest = sizes[smallest <= batches.most], smallest[smallest <= batches.most]
    largest = np.full(sizes.shape, batches.most)
    full = (micro_batch_size or batches.most) * sizes
    return _Shapes(sizes, smallest, largest, full, few=-(-smallest // full), many=-(-largest // full))


def _smallest_enough(speeds: FixedWorkers, shapes: _Shapes) -> Ints:
    """Return the least batches with `ENOUGH` of the throughput of the largest, for each number of workers.

    Where an iteration takes ``fixed + slope * b`` seconds, b has enough where
    ``b = ENOUGH * rate * (fixed + slope * b)``; else it is found by halving.
    """
    throughput = speeds.throughput
    sizes, smallest, largest, *_ = shapes
    seconds = speeds.seconds(largest)
    if throughput.micro_batch_size is None:
        rate = ENOUGH * (largest / seconds)
    else:
        smallest, largest, seconds, rate = _in_fewest_passes(speeds, shapes, seconds)
    if throughput.is_linear:
        growing = throughput.compute.slope * throughput.samples(sizes, largest)
        batch = rate * (seconds - growing) / (1.0 - rate * growing / largest)
    else:
        few, batch = smallest.astype(float), largest.astype(float)
        for _ in range(NUM_HALVINGS):
            middle = np.sqrt(few * batch)
            is_enough = speeds.rate(middle) >= rate
            few, batch = np.where(is_enough, few, middle), np.where(is_enough, middle, batch)
    return np.asarray(np.minimum(np.maximum(np.ceil(batch), smallest), largest), dtype=np.int64)


def _in_fewest_passes(speeds: FixedWorkers, shapes: _Shapes, seconds: Floats) -> tuple[Ints, Ints, Floats, Floats]:
    """Return the least and the largest batch of the fewest passes that are enough, and the seconds of the latter.

    The throughput that is enough comes last; ``seconds`` are those of the largest batch. Of batches whose passes are
    all full, the one with most of them has the highest throughput. Only the largest batch, whose passes need not be
    full, may be faster. p full passes take ``last + (p - 1) * other`` seconds, so they are enough where
    ``p * full = rate * (last - other + p * other)``.
    """
    _, smallest, largest, full, few, many = shapes
    last, other = speeds.pass_seconds(np.asarray(speeds.throughput.micro_batch_size, dtype=float))
    fewer = np.maximum(many - 1, few)
    all_full = np.where(fewer < many, fewer * full / (last + (fewer - 1) * other), 0.0)
    rate = ENOUGH * np.maximum(largest / seconds, all_full)
    gained = full - rate * other
    passes = np.ceil(rate * (last - other) / np.where(gained > 0.0, gained, ROUNDING))
    passes = np.clip(passes, few, np.where(all_full >= largest / seconds, fewer, many)).astype(np.int64)
    seconds = np.where(passes < many, last + (passes - 1) * other, seconds)
    return np.maximum(smallest, (passes - 1) * full + 1), np.minimum(passes * full, largest), seconds, rate


def _impossible(demand: Demand) -> str:
    """Return why no number of workers is possible."""
    if demand.most < demand.least:
        return f"waiting for hosts: its minimum is {demand.least} and it can have at most {demand.most}"
    if demand.batch is not None and demand.batch.most < demand.least * demand.batch.least_per_slot:
        return f"waiting: a batch of {demand.batch.most} is too small for its minimum of {demand.least} workers"
    return f"waiting for hosts: none of its allowed sizes is from {demand.least} to {demand.most}"
