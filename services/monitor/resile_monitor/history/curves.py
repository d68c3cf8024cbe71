"""The curves of one job from the progress that it reports: thinned to a bounded size as it goes on.

- A point is one report, unchanged: the newest of each ``stride`` iterations. When a table is full, its stride doubles.
- A job that resumes from a checkpoint overwrites the points beyond it.
- A report that was handled already, or that is older than the newest, changes nothing: reports may be read again.
- An iteration that ends an epoch may be reported twice: when it is committed, and once more with the scores of the
  validation after it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from resile_shared.messages.curves import MAX_CURVES, MAX_POINTS, Curves, CurveTable
from resile_shared.messages.reports import Progress

_DIGITS = 7


@dataclass(frozen=True, slots=True)
class Point:
    """Numbers at one iteration."""

    iteration: int
    time: int
    """Milliseconds since the epoch."""
    workers: int | None
    values: Mapping[str, float]


@dataclass
class Table:
    """Points by rising iterations."""

    stride: int = 1
    points: list[Point] = field(default_factory=list)

    def add(self, point: Point) -> None:
        """Add a point; it replaces those at its iteration and later ones."""
        self.drop_from(point.iteration)
        if self.points and self._is_one(self.points[-1], point):
            self.points.pop()
        self.points.append(point)
        while len(self.points) > MAX_POINTS:
            self.stride *= 2
            newest = {self._place(point): point for point in self.points}
            self.points = list(newest.values())

    def drop_from(self, iteration: int) -> None:
        """Drop the points at ``iteration`` and after it."""
        while self.points and self.points[-1].iteration >= iteration:
            self.points.pop()

    def message(self) -> CurveTable:
        """Return what is stored of it."""
        names = list(dict.fromkeys(name for point in self.points for name in point.values))[:MAX_CURVES]
        return CurveTable(
            stride=self.stride,
            iterations=tuple(point.iteration for point in self.points),
            times=tuple(point.time for point in self.points),
            workers=tuple(point.workers for point in self.points),
            values={name: tuple(point.values.get(name) for point in self.points) for name in names},
        )

    @classmethod
    def of(cls, stored: CurveTable) -> "Table":
        """Return a table that goes on from what is stored."""
        columns = zip(stored.iterations, stored.times, stored.workers, strict=True)
        points = [
            Point(iteration, time, workers, _present({name: column[n] for name, column in stored.values.items()}))
            for n, (iteration, time, workers) in enumerate(columns)
        ]
        return cls(stored.stride, points)

    def _is_one(self, first: Point, second: Point) -> bool:
        return self._place(first) == self._place(second)

    def _place(self, point: Point) -> int:
        return point.iteration // self.stride


@dataclass
class JobCurves:
    """The curves of one job, up to the newest report."""

    generation: int = 0
    iteration: int = -1
    has_scores: bool = False
    """Whether the newest report held the scores of its iteration."""
    training: Table = field(default_factory=Table)
    validation: Table = field(default_factory=Table)

    def add(self, progress: Progress, *, generation: int, time: int, workers: int | None) -> bool:
        """Add what was reported at ``time``, in milliseconds, by ``workers``; return whether it is new."""
        has_scores = progress.ends_epoch and bool(progress.validation)
        before = (self.generation, self.iteration)
        now = (generation, progress.iteration)
        if (*now, has_scores) <= (*before, self.has_scores):
            return False
        self.generation, self.iteration, self.has_scores = *now, has_scores
        if now > before:
            loss = {} if progress.loss is None else {"loss": progress.loss}
            values = _present({**loss, **progress.metrics})
            self.training.add(Point(progress.iteration, time, workers, values))
            self.validation.drop_from(progress.iteration)
        if has_scores:
            self.validation.add(Point(progress.iteration, time, workers, _present(progress.validation)))
        return True

    def message(self, *, sequence: int) -> Curves:
        """Return what is stored of them, with the sequence of the newest report that was read."""
        return Curves(
            sequence=sequence,
            generation=self.generation,
            training=self.training.message(),
            validation=self.validation.message(),
        )

    @classmethod
    def of(cls, stored: Curves) -> "JobCurves":
        """Return curves that go on from what is stored."""
        last = stored.training.iterations[-1] if stored.training.iterations else -1
        has_scores = stored.validation.iterations[-1:] == (last,)
        return cls(stored.generation, last, has_scores, Table.of(stored.training), Table.of(stored.validation))


def speeds(table: CurveTable) -> tuple[float | None, ...]:
    """Return the iterations per second between each point and the one before; None where that is not known."""
    pairs = pairwise(zip(table.iterations, table.times, strict=True))
    between = (
        1000 * (after - before) / (end - begin) if end > begin else None for (before, begin), (after, end) in pairs
    )
    return (None, *between) if table.iterations else ()


def _present(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the finite numbers, which JSON can represent, rounded to as many digits as are drawn."""
    return {
        name: float(f"{value:.{_DIGITS}g}")
        for name, value in list(values.items())[:MAX_CURVES]
        if value is not None and math.isfinite(value)
    }
