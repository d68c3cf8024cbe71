"""Shares slots so that the sum of what they are worth to the jobs is largest: a multiple-choice knapsack, exactly.

1. A price for a slot is found at which the jobs, each taking the size with most value less price, use the slots up or
   nearly so. It is the price of the problem's Lagrangean dual, found by intersecting tangents of the dual function.
2. Jobs that are indifferent at that price take steps while these fit, those with fewest slots first. If no slot is
   left, or slots are worth nothing, this is optimal. It always is where every curve is concave and has all sizes: the
   steps are then the largest marginal gains.
3. Otherwise a dynamic program over the difference to that solution looks for a better one. Another size costs its job a
   loss against the price, and an idle slot costs the price. A solution that beats the best one so far has only losses
   below that one's, so few jobs and sizes are looked at, in the order of their losses (the core of D. Pisinger, "A
   minimal algorithm for the multiple-choice knapsack problem", EJOR 83, 1995).

The result depends on the curves and their order alone. Of equally good solutions any may be returned, but where steps
are equally good they go to the job with fewer slots, then to the earlier one: jobs with equal, linear curves share
equally.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ROUNDING = 1e-12
"""Values that differ by less than this, relative to the largest one, are equal."""


@dataclass(frozen=True, eq=False, slots=True)
class Curve:
    """What each allowed number of slots is worth to a job.

    ``sizes`` rise strictly, from 0 if the job may have none; ``values`` are finite. At least one of each.
    """

    sizes: Ints
    values: Floats


def solve(curves: Sequence[Curve], num_slots: int) -> list[int]:
    """Return the size for each curve that makes the sum of the values largest, with at most ``num_slots`` in all.

    Exact up to the rounding of sums. Raises ValueError if the smallest sizes alone exceed ``num_slots``.
    """
    if not curves:
        return []
    points = _Points.of(curves)
    smallest = int(points.sizes[points.starts].sum())
    if smallest > num_slots:
        raise ValueError(f"the smallest sizes use {smallest} slots, more than {num_slots}")
    num_slots -= (num_slots - smallest) % _step(points)
    price, tied = _price(points, num_slots)
    chosen, left = _fill(points, tied, num_slots)
    if left and price > 0.0:
        for point in _improvements(points, chosen, price, left):
            chosen[points.job[point]] = point
    return [int(size) for size in points.sizes[chosen]]


@dataclass(frozen=True, eq=False, slots=True)
class _Points:
    """The points of all curves, one curve after the other."""

    sizes: Ints
    values: Floats
    job: Ints
    starts: Ints
    """The index of each job's first point."""
    lengths: Ints
    """The number of points of each job."""
    origin: Ints
    """The indices of these points among all points."""
    rounding: float

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> "_Points":
        lengths = np.array([len(curve.sizes) for curve in curves])
        values = np.concatenate([curve.values for curve in curves])
        return cls(
            sizes=np.concatenate([curve.sizes for curve in curves]),
            values=values,
            job=np.repeat(np.arange(len(curves)), lengths),
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
            origin=np.arange(len(values)),
            rounding=ROUNDING * float(max(values.max(), -values.min())),
        )

    def between(self, first: Ints, last: Ints) -> "_Points":
        """Return the points from ``first`` to ``last`` of each job."""
        lengths = last - first + 1
        starts = np.cumsum(lengths) - lengths
        job = np.repeat(np.arange(len(lengths)), lengths)
        if len(job) == len(self.job):
            return self
        kept = np.repeat(first - starts, lengths)
        kept += np.arange(len(kept))
        return _Points(self.sizes[kept], self.values[kept], job, starts, lengths, self.origin[kept], self.rounding)

    def best(self, price: float) -> Ints:
        """Return the points with most value less price of each job, ties included."""
        surplus = self.values
        if price:
            surplus = np.asarray(price * self.sizes, dtype=np.float64)
            np.subtract(self.values, surplus, out=surplus)
        most = np.maximum.reduceat(surplus, self.starts)
        return np.flatnonzero(surplus >= np.repeat(most - self.rounding, self.lengths))


def _step(points: _Points) -> int:
    """Return the largest number that divides every size less the smallest one of its job."""
    first = points.sizes[: points.lengths[0]]
    if np.gcd.reduce(first - first[0]) == 1:
        return 1
    smallest = np.repeat(points.sizes[points.starts], points.lengths)
    return int(np.gcd.reduce(points.sizes - smallest)) or 1


def _firsts(groups: Ints) -> Ints:
    """Return where each run of equal numbers begins."""
    is_first = np.ones(len(groups), dtype=bool)
    np.not_equal(groups[1:], groups[:-1], out=is_first[1:])
    return is_first.nonzero()[0]


def _lasts(groups: Ints) -> Ints:
    """Return where each run of equal numbers ends."""
    is_last = np.ones(len(groups), dtype=bool)
    np.not_equal(groups[1:], groups[:-1], out=is_last[:-1])
    return is_last.nonzero()[0]


def _price(points: _Points, num_slots: int) -> tuple[float, Ints]:
    """Return the price at which the jobs use the slots up or nearly so, and the points they are indifferent between.

    The fewest slots that they may then use fit, and with a positive price the most do not, or are exactly all.
    """
    below = points.starts
    above = points.best(0.0)
    above = above[_firsts(points.job[above])]
    if points.sizes[above].sum() <= num_slots:
        return 0.0, above
    while True:
        slots = points.sizes[above].sum() - points.sizes[below].sum()
        price = float((points.values[above].sum() - points.values[below].sum()) / slots)
        points = points.between(below, above)
        best = points.best(price)
        fewest, most = best[_firsts(points.job[best])], best[_lasts(points.job[best])]
        below, above = points.starts, _lasts(points.job)
        if points.sizes[fewest].sum() > num_slots and (fewest != above).any():
            above = fewest
        elif points.sizes[most].sum() < num_slots and (most != below).any():
            below = most
        elif points.sizes[fewest].sum() <= num_slots <= points.sizes[most].sum():
            return price, points.origin[best]
        else:  # only rounding makes a difference between what is below and above
            return price, points.origin[np.union1d(below, above)]


def _fill(points: _Points, tied: Ints, num_slots: int) -> tuple[Ints, int]:
    """Return a point of ``tied`` for each job, and how many slots are left: steps are taken while they fit."""
    job, sizes = points.job[tied], points.sizes[tied]
    at = _firsts(job)
    left = num_slots - int(sizes[at].sum())
    steps = np.flatnonzero(job[1:] == job[:-1])
    steps = steps[np.argsort(sizes[steps], kind="stable")]
    while len(steps):
        widths = sizes[steps + 1] - sizes[steps]
        fit = int(np.searchsorted(np.cumsum(widths), left, side="right"))
        np.maximum.at(at, job[steps[:fit]], steps[:fit] + 1)
        left -= int(widths[:fit].sum())
        steps = steps[fit:]
        too_wide = steps[widths[fit:] > left]
        barred = np.full(len(at), len(tied))
        np.minimum.at(barred, job[too_wide], too_wide)
        steps = steps[steps < barred[job[steps]]]
    return tied[at], left


def _improvements(points: _Points, chosen: Ints, price: float, left: int) -> Iterator[int]:
    """Yield the points to choose instead of ``chosen``, for some jobs, so that the sum of the values is largest."""
    surplus = points.values - price * points.sizes
    losses = np.maximum(surplus[chosen][points.job] - surplus, 0.0)
    more = points.sizes - points.sizes[chosen][points.job]
    limit = price * left
    fitting = (more != 0) & (more <= left)
    if fitting.any():
        limit = min(limit, float((losses + price * (left - more))[fitting].min()))
    near = np.flatnonzero((more != 0) & (losses <= limit))
    if not len(near):
        return
    widest = max(int(np.abs(more[near]).max()), left)
    near = near[_cheapest(more[near], losses[near], 2 * widest)]
    first = _firsts(points.job[near])
    ends = np.append(first[1:], len(near))
    least = np.minimum.reduceat(losses[near], first)
    search = _Search(price, left, limit=limit, widest=widest)
    for turn in np.argsort(least, kind="stable"):
        if search.limit < max(float(least[turn]), points.rounding) or search.is_exhausted:
            break
        of_job = near[first[turn] : ends[turn]]
        of_job = of_job[losses[of_job] <= search.limit]
        search.add(of_job, more[of_job], losses[of_job], float(least[turn]))
    yield from search.points()


def _cheapest(more: Ints, losses: Floats, number: int) -> Ints:
    """Return where the ``number`` smallest losses are for each value of ``more``, in order."""
    order = np.lexsort((losses, more))
    first = _firsts(more[order])
    rank = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    return np.sort(order[rank < number])


class _Search:
    """The dynamic program, extended job by job in the order of their smallest loss.

    A state is how many slots more are used than by the given solution, and its value the smallest loss for that.

    With ``widest`` the most slots by which a job changes, fewer than 2 ``widest`` jobs change in some best solution: in
    a suitable order the partial sums of more changes take one value twice, and what is between could as well be left
    out (F. Eisenbrand and R. Weismantel, "Proximity results and faster algorithms for integer programming using the
    Steinitz lemma", SODA 2018). So of the changes by equally many slots only the 2 ``widest`` with the smallest losses
    matter, and no sum of changes exceeds the square of ``widest`` by more than what is left.
    """

    def __init__(self, price: float, left: int, *, limit: float, widest: int) -> None:
        self.limit = limit
        """The cost of the best solution that is known to exist: its losses, and the price of what it leaves."""
        self._price = price
        self._left = left
        self._furthest = widest**2 + left
        self._lowest = 0
        """The difference in slots that the first state stands for."""
        self._losses = np.zeros(1)
        self._stages: list[tuple[Ints, Ints, Floats, int, Floats]] = []
        """For each job: its points, their differences and losses, and the states before it."""
        self._best = (price * left, 0, 0, 0.0)
        """The best solution: its cost, the number of stages, the difference in slots, the losses."""

    @property
    def is_exhausted(self) -> bool:
        """Whether no state is left that could become a better solution."""
        return not len(self._losses)

    def add(self, points: Ints, more: Ints, losses: Floats, least: float) -> None:
        """Let one more job change to one of its points. No job added later has a loss below ``least``."""
        self._stages.append((points, more, losses, self._lowest, self._losses))
        old, length = self._losses, len(self._losses)
        lowest = self._lowest + min(int(more.min()), 0)
        new = np.full(self._lowest + length + max(int(more.max()), 0) - lowest, np.inf)
        stay = self._lowest - lowest
        new[stay : stay + length] = old
        for difference, loss in zip(more.tolist(), losses.tolist(), strict=True):
            part = new[stay + difference : stay + difference + length]
            np.minimum(part, old + loss, out=part)
        self._lowest, self._losses = lowest, new
        self._note_best()
        # A state that is still to be changed costs one more loss at least.
        alive = np.flatnonzero(new + least <= self.limit)
        alive = alive[np.abs(alive + lowest) <= self._furthest]
        begin, end = (int(alive[0]), int(alive[-1]) + 1) if len(alive) else (0, 0)
        self._lowest, self._losses = lowest + begin, new[begin:end]

    def _note_best(self) -> None:
        """Look for a state that fits and costs less than the best solution."""
        ends = self._losses[: max(self._left - self._lowest + 1, 0)]
        if not len(ends):
            return
        costs = ends + self._price * (self._left - self._lowest - np.arange(len(ends)))
        cheapest = int(costs.argmin())
        if costs[cheapest] < self._best[0]:
            self._best = (float(costs[cheapest]), len(self._stages), self._lowest + cheapest, float(ends[cheapest]))
            self.limit = min(self.limit, self._best[0])

    def points(self) -> Iterator[int]:
        """Yield the points of the jobs that change in the best solution."""
        _, num_stages, state, total = self._best
        for points, more, losses, lowest, before in reversed(self._stages[:num_stages]):
            index = state - lowest
            if 0 <= index < len(before) and before[index] == total:
                continue
            for point, difference, loss in zip(points.tolist(), more.tolist(), losses.tolist(), strict=True):
                index = state - difference - lowest
                if 0 <= index < len(before) and before[index] + loss == total:
                    state, total = state - difference, float(before[index])
                    yield point
                    break
