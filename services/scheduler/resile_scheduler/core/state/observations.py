"""What was observed of jobs, for policies: their speed, and what a change costs them.

Workers measure, and report. Nothing of it is stored, since a new scheduler learns it again in a minute or two. A policy
sees new observations only from time to time (`observation_timer.py`), and only those that differ by more than their
noise: measurements jitter, and this must not move slots back and forth.
"""

from collections import deque
from dataclasses import dataclass
from datetime import datetime
from math import frexp, isfinite, ldexp
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from resile_shared.messages.reports import Measurement, Progress, Ready, Report, Switched

if TYPE_CHECKING:
    from ...policies.stable_fit import StableFit
    from ...policies.throughput import Throughput

OBSERVE_SECONDS = 30.0
CHANGE_SECONDS = 0.53
"""Seconds of training that a change costs until one was measured: a small model on one host (bench/rescale.py)."""
MOST_CHANGE_SECONDS = 60.0
NUM_NEWEST = 8
"""The median of this many newest changes, or paces, counts."""
NOTICEABLE = 1.25
"""A noise scale or a cost that differs by less than this factor counts as unchanged."""


@dataclass(frozen=True)
class Observation:
    """What a policy sees of a job's observations; the fields are those of `Demand`."""

    throughput: "Throughput | None" = None
    most_measured: int = 0
    noise_scale: float | None = None
    change_seconds: float = CHANGE_SECONDS
    attained: float = 0.0
    iterations_total: int | None = None
    """The newest reported number of iterations; None: that of the training call."""
    deadline_seconds: float | None = None


class _Point(NamedTuple):
    """How far a generation had come, by the clock of the host that reported it."""

    host: str
    generation: int
    iteration: int
    time: datetime


class ChangeCost:
    """The training time that a job loses when its workers change.

    It is the time from the last report before the change to the first iteration after it, less the usual time of the
    iterations between: the pause, and the slowdown while joiners warm up.
    """

    def __init__(self) -> None:
        self._before: _Point | None = None
        self._paces: deque[float] = deque(maxlen=NUM_NEWEST)
        self._lost: deque[float] = deque(maxlen=NUM_NEWEST)

    @property
    def seconds(self) -> float:
        """The median of the newest changes."""
        return median(self._lost) if self._lost else CHANGE_SECONDS

    def on_progress(self, report: Report, iteration: int) -> None:
        """Note how far the job is, while no change is under way."""
        point = _Point(report.host, report.generation, iteration, report.time)
        before, self._before = self._before, point
        if before and before[:2] == point[:2] and iteration > before.iteration and point.time > before.time:
            self._paces.append((point.time - before.time).total_seconds() / (iteration - before.iteration))

    def on_switched(self, report: Report, switched: Switched) -> None:
        """Measure the change that ends with ``switched``."""
        lost, before = switched.pause_seconds, self._before
        if before and before.host == report.host and self._paces:
            passed = (report.time - before.time).total_seconds()
            lost = max(lost, passed - median(self._paces) * (switched.iteration - before.iteration))
        if isfinite(lost):
            self._lost.append(min(max(lost, 0.0), MOST_CHANGE_SECONDS))
        self._before = None
        self._paces.clear()


class Observer:
    """Learns from what one job reports."""

    def __init__(self) -> None:
        self.observation = Observation()
        """The observation, as policies see it."""
        self.has_grown = False
        """Whether the job has measured more workers than ever since policies last saw its measurements."""
        self._most_workers = 0
        self._fit: StableFit | None = None
        self._noise_scale: float | None = None
        self._iterations_total: int | None = None
        self._change = ChangeCost()

    def on_progress(self, report: Report, progress: Progress, *, ready: Ready, is_changing: bool) -> None:
        """Learn from what iterations measured; ``is_changing``: a newer generation is about to take over."""
        if is_changing:
            return
        self._change.on_progress(report, progress.iteration)
        self._noise_scale = progress.noise_scale if progress.noise_scale is not None else self._noise_scale
        self._iterations_total = progress.iterations_total
        if progress.measurement is not None:
            self._measure(progress.measurement, ready)

    def on_switched(self, report: Report, switched: Switched) -> None:
        """Learn what a change has cost."""
        self._change.on_switched(report, switched)

    def _measure(self, measured: Measurement, ready: Ready) -> None:
        if measured.workers > self._most_workers:
            self._most_workers, self.has_grown = measured.workers, True
        from ...policies.stable_fit import StableFit  # `resile run` loads no numpy before something is measured
        from ...policies.throughput import Measurement as Configuration

        if self._fit is None:
            self._fit = StableFit(
                None if ready.is_fast else ready.num_shards,
                may_grow=ready.batch_range is not None,
                micro_batch_size=ready.micro_batch_size if ready.is_fast else None,
            )
        self._fit.add(
            Configuration(
                measured.workers,
                measured.batch_size,
                measured.hosts,
                measured.compute_seconds,
                measured.exchange_seconds,
                measured.iterations,
            )
        )

    def observe(self, *, attained: float, deadline_seconds: float | None = None) -> bool:
        """Update what policies see; return whether it changed. ``attained``: the slot-seconds that the job has held."""
        seen, self.has_grown = self.observation, False
        self.observation = Observation(
            throughput=self._fit.throughput if self._fit else None,
            most_measured=self._most_workers,
            noise_scale=_noticed(seen.noise_scale, self._noise_scale),
            change_seconds=_noticed(seen.change_seconds, self._change.seconds) or 0.0,
            attained=_power_of_two(attained),
            iterations_total=self._iterations_total,
            deadline_seconds=deadline_seconds,
        )
        return self.observation != seen


def _noticed(seen: float | None, newest: float | None) -> float | None:
    """Return ``newest`` if it differs noticeably from ``seen``, else ``seen``."""
    if seen is None or newest is None:
        return newest
    return seen if seen / NOTICEABLE <= newest <= seen * NOTICEABLE else newest


def _power_of_two(number: float) -> float:
    """Round down to a power of two: jobs that share by turns take turns ever less often."""
    return ldexp(0.5, frexp(number)[1]) if number >= 1.0 else 0.0
