"""Refuses learning-rate schedules that were made for epochs, and are stepped each iteration."""

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR, PolynomialLR

from resile_shared.errors import UsageError


class ScheduleWatch:
    """Notices a schedule that is stepped in each iteration, after two of them."""

    def __init__(self, schedules: Iterable[Any]) -> None:
        self._schedules = [each for each in schedules if isinstance(each, LRScheduler)]
        self._seen: deque[tuple[int, list[int]]] = deque(maxlen=3)
        """The epoch of the newest iterations, and the steps that each schedule had made before them."""

    def check(self, *, epoch: int, epochs: int, iterations_total: int) -> None:
        """Before an iteration of ``epoch``. Raises UsageError: see `check_made_for_iterations`."""
        self._seen.append((epoch, [schedule.last_epoch for schedule in self._schedules]))
        if len(self._seen) < 3 or self._seen[0][0] != epoch:
            return
        steps = zip(*(made for _, made in self._seen), strict=True)
        stepped = [
            schedule
            for schedule, (first, second, third) in zip(self._schedules, steps, strict=True)
            if first < second < third  # one that is stepped at the start of an epoch has made one step there
        ]
        check_made_for_iterations(stepped, epochs=epochs, iterations_total=iterations_total)


def check_made_for_iterations(schedules: Iterable[Any], *, epochs: int, iterations_total: int) -> None:
    """Raises UsageError for a schedule that ends with the epochs of a run, though it is stepped each iteration.

    It then ends where the epochs do, or has its last milestone in their second half.
    Schedules that end sooner are meant to, in iterations: a cosine that rises again, a few steps at the beginning.
    """
    for schedule in schedules:
        name, ends = _end(schedule, epochs)
        if ends and 1 < epochs < iterations_total:
            raise UsageError(
                f"{type(schedule).__name__} is made for the {epochs} epochs of this run ({name}) and stepped once an "
                f"iteration, of which there are {iterations_total}. Give it {name} in iterations "
                f"({iterations_total // epochs} make an epoch), or step it once an epoch: with "
                'lr_scheduler_interval="epoch" of ElasticModel, or after the loop over a prepared loader'
            )


def _end(schedule: Any, epochs: int) -> tuple[str, bool]:
    """What sets the end of a schedule, and whether that is the end of ``epochs`` epochs."""
    if isinstance(schedule, CosineAnnealingLR):
        return "T_max", int(schedule.T_max) == epochs
    if isinstance(schedule, PolynomialLR):
        return "total_iters", int(schedule.total_iters) == epochs
    if isinstance(schedule, MultiStepLR):
        return "milestones", epochs <= 2 * max(schedule.milestones, default=0) <= 2 * epochs
    return "", False
