"""Measured profiles of applications: how long an iteration takes where, and what a larger batch is worth.

A profile is a folder with

- ``placements.csv``: ``placement, local_bsz, step_time, sync_time``. A placement has one digit for each node: 134 is
  1, 3 and 4 workers on three nodes. The nodes form a ring, so a placement stands for its rotations.
- ``scalability.csv``: ``num_nodes, num_replicas, local_bsz, step_time, sync_time``, for larger numbers of nodes.
- ``validation-B.csv``, one for each measured batch size B: ``progress, grad_sqr, grad_var``, a row for each epoch.
  Progress counts iterations at the smallest batch.

Times are seconds, batches are samples, a local batch is that of one worker and one step.
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from .csv_table import MalformedFile, cell, non_negative, positive, positive_int, read_rows

Placement = tuple[int, ...]
"""The number of workers on each node that has any, in the order of the ring."""
Curve = tuple[tuple[int, float, float], ...]
"""Rising local batches, each with the seconds of a step and of the exchange within it."""
Epochs = tuple[tuple[float, float, float], ...]
"""For each epoch its last progress, and the squared norm and the variance of the gradient in it."""

RESOLUTION = 1e-9
"""The error that rounding may leave in a sum of progress, relative to it."""


@dataclass(frozen=True, eq=False)
class Application:
    """One application's profile."""

    name: str
    placements: Mapping[Placement, Curve]
    by_size: Mapping[tuple[int, int], Curve]
    """Curves by numbers of nodes and workers: means over placements, and what was measured on more nodes."""
    epochs: Mapping[int, Epochs]
    """The epochs by batch size, rising."""
    smallest_local: int
    largest_local: int
    _times: dict[tuple[Placement, int], tuple[float, float]] = field(default_factory=dict, repr=False)
    _gradients: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict, repr=False)

    @property
    def initial_batch(self) -> int:
        """The batch size in whose iterations progress is counted."""
        return min(self.epochs)

    @property
    def largest_batch(self) -> int:
        """The largest batch size that was measured."""
        return max(self.epochs)

    @property
    def num_epochs(self) -> int:
        """How many epochs a job trains."""
        return min(map(len, self.epochs.values()))

    def progress_after(self, num_epochs: int) -> float:
        """Return the progress at which ``num_epochs`` epochs are complete."""
        return min(rows[num_epochs - 1][0] for rows in self.epochs.values()) if num_epochs else 0.0

    def epoch_at(self, progress: float) -> int:
        """Return the epoch, counted from 0, in which progress is ``progress``; the last epoch at its end."""
        ends = self._ends
        return min(bisect_right(ends, progress * (1 + RESOLUTION)), len(ends) - 1)

    @cached_property
    def _ends(self) -> list[float]:
        return [self.progress_after(epoch + 1) for epoch in range(self.num_epochs)]

    def split(self, batch: float, num_workers: int) -> tuple[int, int]:
        """Return the local batch of one step, and the steps before the one with the exchange; see `split_batch`."""
        return split_batch(
            batch,
            num_workers,
            initial=self.initial_batch,
            largest_local=self.largest_local,
            largest_batch=self.largest_batch,
        )

    def speed(self, placement: Placement, batch: float, epoch: int) -> float:
        """Return the progress per second in an epoch counted from 0."""
        num_workers = sum(placement)
        local, steps = self.split(batch, num_workers)
        step, sync = self.step_times(placement, local)
        return self.gain(num_workers * local * (steps + 1), epoch) / (step + steps * (step - sync))

    def gain(self, batch: int, epoch: int) -> float:
        """Return the progress of an iteration in an epoch counted from 0."""
        squared, variance = self.gradient(batch, epoch)
        noise = variance * self.initial_batch / batch + squared
        return (variance + squared) / noise if noise else 1.0

    def step_times(self, placement: Placement, local: int) -> tuple[float, float]:
        """Return the seconds of a step with an exchange, and of the exchange within it, at a local batch.

        Interpolates linearly, between the measured sizes if the placement was not measured.
        """
        key = (placement, local)
        if key not in self._times:
            curve = self.placements.get(smallest_rotation(placement))
            found = _at(curve, local) if curve else self._at_size(len(placement), sum(placement), local)
            self._times[key] = found
        return self._times[key]

    def gradient(self, batch: int, epoch: int) -> tuple[float, float]:
        """Return the squared norm of the gradient and its variance at the initial batch, in an epoch counted from 0.

        Linear in the batch between the two that were measured around it.
        """
        key = (batch, epoch)
        if key not in self._gradients:
            sizes = list(self.epochs)
            above = sizes[min(bisect_left(sizes, batch), len(sizes) - 1)]
            below = sizes[max(bisect_right(sizes, batch) - 1, 0)]
            (_, low_sqr, low_var), (_, high_sqr, high_var) = self.epochs[below][epoch], self.epochs[above][epoch]
            share = (batch - below) / (above - below) if above > below else 0.0
            self._gradients[key] = low_sqr + share * (high_sqr - low_sqr), low_var + share * (high_var - low_var)
        return self._gradients[key]

    def _at_size(self, num_nodes: int, num_workers: int, local: int) -> tuple[float, float]:
        """Interpolate between the measured numbers of nodes at equal workers per node, there between workers."""
        per_node = num_workers / num_nodes
        measured = sorted({nodes for nodes, _ in self.by_size})
        above = measured[min(bisect_left(measured, num_nodes), len(measured) - 1)]
        below = measured[max(bisect_right(measured, num_nodes) - 1, 0)]
        low, high = self._at_nodes(below, per_node * below, local), self._at_nodes(above, per_node * above, local)
        return _mix(low, high, (num_nodes - below) / (above - below) if above > below else 0.0)

    def _at_nodes(self, num_nodes: int, num_workers: float, local: int) -> tuple[float, float]:
        measured = sorted(workers for nodes, workers in self.by_size if nodes == num_nodes)
        above = measured[min(bisect_left(measured, num_workers), len(measured) - 1)]
        below = measured[max(bisect_right(measured, num_workers) - 1, 0)]
        low, high = _at(self.by_size[num_nodes, below], local), _at(self.by_size[num_nodes, above], local)
        return _mix(low, high, (num_workers - below) / (above - below) if above > below else 0.0)


def smallest_rotation(placement: Placement) -> Placement:
    """Return the rotation of a ring of nodes that comes first."""
    return min(placement[start:] + placement[:start] for start in range(len(placement)))


def split_batch(
    batch: float, num_workers: int, *, initial: int, largest_local: int, largest_batch: int
) -> tuple[int, int]:
    """Return the local batch of one step, and the steps before the one with the exchange, for a global batch.

    One worker takes at least two steps for more than the initial batch: a single one says nothing about the noise.
    """
    local = math.ceil(batch / num_workers - 1e-8)
    steps = math.ceil(local / largest_local) - 1
    if num_workers == 1 and batch > initial:
        steps = max(steps, 1)
    return min(math.ceil(local / (steps + 1)), largest_batch // (num_workers * (steps + 1))), steps


def read_application(folder: Path, *, largest_local: int | None = None) -> Application:
    """Return the profile in a folder; ``largest_local`` limits the local batch below what was measured.

    Raises:
        MalformedFile: a file is missing or wrong.

    """
    placements = _read_placements(folder / "placements.csv")
    by_size = _means({(len(p), sum(p)): [] for p in placements}, placements)
    by_size.update(_read_scalability(folder / "scalability.csv"))
    measured = [local for curve in placements.values() for local, _, _ in curve]
    return Application(
        name=folder.name,
        placements=placements,
        by_size=by_size,
        epochs=_read_validations(folder),
        smallest_local=min(measured),
        largest_local=min(max(measured), largest_local or max(measured)),
    )


def _read_placements(path: Path) -> dict[Placement, Curve]:
    curves: dict[Placement, dict[int, tuple[float, float]]] = {}
    for row in read_rows(path, ("placement", "local_bsz", "step_time", "sync_time")):
        placement = cell(path, row, "placement", _placement, expected="digits from 1 to 9, one for each node")
        local = cell(path, row, "local_bsz", positive_int, expected="a whole number of samples")
        step = cell(path, row, "step_time", positive, expected="a number of seconds above 0")
        sync = cell(path, row, "sync_time", non_negative, expected="a number of seconds")
        if local in curves.setdefault(smallest_rotation(placement), {}):
            raise MalformedFile(path, "measured twice", line=row[0], column="local_bsz")
        curves[smallest_rotation(placement)][local] = step, sync
    return {placement: _curve(times) for placement, times in curves.items()}


def _read_scalability(path: Path) -> dict[tuple[int, int], Curve]:
    curves: dict[tuple[int, int], dict[int, tuple[float, float]]] = {}
    for row in read_rows(path, ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")):
        nodes = cell(path, row, "num_nodes", positive_int, expected="a whole number of nodes")
        workers = cell(path, row, "num_replicas", positive_int, expected="a whole number of workers")
        local = cell(path, row, "local_bsz", positive_int, expected="a whole number of samples")
        step = cell(path, row, "step_time", positive, expected="a number of seconds above 0")
        sync = cell(path, row, "sync_time", non_negative, expected="a number of seconds")
        curves.setdefault((nodes, workers), {})[local] = step, sync
    return {size: _curve(times) for size, times in curves.items()}


def _read_validations(folder: Path) -> dict[int, Epochs]:
    found = {
        int(match[1]): path
        for path in folder.glob("validation-*.csv")
        if (match := re.search(r"-(\d+)\.csv$", path.name))
    }
    if not found:
        raise MalformedFile(folder / "validation-*.csv", "no such file")
    return {batch: _read_epochs(found[batch]) for batch in sorted(found)}


def _read_epochs(path: Path) -> Epochs:
    epochs = []
    before = 0.0
    for row in read_rows(path, ("progress", "grad_sqr", "grad_var")):
        progress = cell(path, row, "progress", positive, expected="a number of iterations above 0")
        if progress <= before:
            raise MalformedFile(path, "progress does not rise", line=row[0], column="progress")
        before = progress
        squared = cell(path, row, "grad_sqr", non_negative, expected="a number of at least 0")
        variance = cell(path, row, "grad_var", non_negative, expected="a number of at least 0")
        epochs.append((progress, squared, variance))
    return tuple(epochs)


def _placement(text: str) -> Placement:
    digits = tuple(int(digit) for digit in text)
    if not digits or 0 in digits:
        raise ValueError
    return digits


def _curve(times: Mapping[int, tuple[float, float]]) -> Curve:
    return tuple((local, *times[local]) for local in sorted(times))


def _means(
    by_size: dict[tuple[int, int], list[Curve]], placements: Mapping[Placement, Curve]
) -> dict[tuple[int, int], Curve]:
    for placement, curve in placements.items():
        by_size[len(placement), sum(placement)].append(curve)
    return {size: _mean(curves) for size, curves in by_size.items()}


def _mean(curves: Sequence[Curve]) -> Curve:
    points: dict[int, list[tuple[float, float]]] = {}
    for curve in curves:
        for local, step, sync in curve:
            points.setdefault(local, []).append((step, sync))
    return _curve(
        {
            local: (sum(step for step, _ in times) / len(times), sum(sync for _, sync in times) / len(times))
            for local, times in points.items()
        }
    )


def _at(curve: Curve, local: int) -> tuple[float, float]:
    """Interpolate; beyond the ends, as between the two nearest points."""
    if len(curve) == 1:
        return curve[0][1:]
    above = min(max(bisect_left(curve, (local,)), 1), len(curve) - 1)
    (low, *at_low), (high, *at_high) = curve[above - 1], curve[above]
    return _mix((at_low[0], at_low[1]), (at_high[0], at_high[1]), (local - low) / (high - low))


def _mix(low: tuple[float, float], high: tuple[float, float], share: float) -> tuple[float, float]:
    return low[0] + share * (high[0] - low[0]), low[1] + share * (high[1] - low[1])
