"""What the demo keeps of a run while it watches it."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from resile_learner.local.events import Progressed, Rescaled, RunEvent

WINDOW = 8  # iterations: the epoch of the example, so that each window holds one validation


@dataclass(frozen=True)
class Point:
    """A run was seen to have committed ``iteration`` iterations, at the moment ``seconds``."""

    iteration: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Speed:
    """Iterations a second over the `WINDOW` iterations, or a few more, that end with ``iteration``."""

    iteration: int
    per_second: float


@dataclass(frozen=True)
class Stretch:
    """``workers`` trained iterations ``first`` to ``last`` - 1."""

    first: int
    last: int
    workers: int


class Recording:
    """The losses and the sizes of one run."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._sizes: list[tuple[int, int]] = []

    def add(self, event: RunEvent, *, seconds: float) -> None:
        """Take in what a run tells at the moment ``seconds``."""
        match event:
            case Rescaled(after=workers, iteration=iteration):
                self._sizes.append((iteration, workers))
            case Progressed(progress=progress) if progress.loss is not None:
                if not self.points or progress.iteration > self.points[-1].iteration:
                    self.points.append(Point(progress.iteration, seconds, progress.loss))
            case _:
                pass

    @property
    def losses(self) -> dict[int, float]:
        """The loss by the number of iterations committed, wherever it was told."""
        return {point.iteration: point.loss for point in self.points}

    def stretches(self) -> list[Stretch]:
        """The parts between two changes of size."""
        end = self.points[-1].iteration if self.points else 0
        return [Stretch(first, last, workers) for (first, workers), (last, _) in pairwise([*self._sizes, (end, 0)])]

    def speeds(self, stretch: Stretch) -> Iterator[Speed]:
        """Measure the speed within ``stretch``, wherever there were enough iterations."""
        points = [point for point in self.points if stretch.first <= point.iteration <= stretch.last]
        for end in points:
            enough = bisect_right(points, end.iteration - WINDOW, key=lambda point: point.iteration)
            if enough:
                begin = points[enough - 1]
                yield Speed(end.iteration, (end.iteration - begin.iteration) / (end.seconds - begin.seconds))
