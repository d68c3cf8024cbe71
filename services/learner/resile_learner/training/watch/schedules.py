"""Refuses learning-rate schedules that were made for epochs, and are stepped each iteration."""

from collections.abc import Iterable
from typing import Any

from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR, PolynomialLR

from resile_shared.errors import UsageError


def check_schedules(schedules: Iterable[Any], *, epochs: int, iteration: int, iterations_total: int) -> None:
    """Raises UsageError for a schedule that fits into the number of epochs, and has made more steps than that.

    Cosine and polynomial schedules have an end of their own, schedules with milestones the last of these.
    """
    for schedule in schedules:
        if not isinstance(schedule, LRScheduler):
            continue
        name, end = _end(schedule)
        if end is not None and end <= epochs < schedule.last_epoch and iteration < iterations_total:
            raise UsageError(
                f"{type(schedule).__name__} ends after {end} steps ({name}) and has made {schedule.last_epoch} by "
                f"iteration {iteration} of {iterations_total}: it is stepped once an iteration. Give it {name} in "
                f"iterations ({iterations_total // epochs} make an epoch), or step it once an epoch: with "
                'lr_scheduler_interval="epoch" of ElasticModel, or after the loop over a prepared loader'
            )


def _end(schedule: LRScheduler) -> tuple[str, int | None]:
    if isinstance(schedule, CosineAnnealingLR):
        return "T_max", int(schedule.T_max)
    if isinstance(schedule, PolynomialLR):
        return "total_iters", int(schedule.total_iters)
    if isinstance(schedule, MultiStepLR):
        return "milestones", max(schedule.milestones, default=None)
    return "", None
