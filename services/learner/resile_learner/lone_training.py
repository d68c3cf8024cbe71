"""Finds scripts whose processes each train alone, started by another launcher or before their training call."""

import os
from collections.abc import Callable, Mapping

import torch.distributed
from torch.optim.optimizer import register_optimizer_step_post_hook

from resile_shared.errors import UsageError

_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""The variables in which torchrun, Open MPI, MPICH and MVAPICH give the number of processes they have started."""
STEPS = 100
"""More optimizer steps than a script makes to prepare its data or its model."""


class StartedSeveralTimes(UsageError):
    """A script that trains elastically was started by a launcher of several processes."""

    def __init__(self, number: int, how: str) -> None:
        super().__init__(
            f"this script trains elastically and was started as one of {number} processes ({how}): each of them would "
            f"train by itself. Start it with `resile run SCRIPT --workers {number}`, or with plain `python`; a script "
            "for torchrun or a gang needs no call of resile.training"
        )


def check_not_started_several_times(environment: Mapping[str, str] | None = None) -> None:
    """Raises StartedSeveralTimes if this process is one of several that a launcher has started."""
    environment = os.environ if environment is None else environment
    for name in _SIZES:
        value = environment.get(name, "")
        if value.isdecimal() and int(value) > 1:
            raise StartedSeveralTimes(int(value), f"{name}={value}")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        number = torch.distributed.get_world_size()
        if number > 1:
            raise StartedSeveralTimes(number, "torch.distributed has a process group")


class LoneTraining:
    """Counts the optimizer steps of this process, and calls ``report`` once if many come before the training call."""

    def __init__(self, *, is_called: Callable[[], bool], report: Callable[[str], None]) -> None:
        self._is_called = is_called
        self._report = report
        self._steps = 0
        self.hook = register_optimizer_step_post_hook(self._on_step)

    def _on_step(self, *arguments: object) -> None:
        self._steps += 1
        if self._steps == STEPS and not self._is_called():
            self._report(
                f"the script has made {STEPS} optimizer steps without a training call: each worker is running this "
                "script alone. Call resile.training.prepare(model, optimizer, loader), ElasticModel(...).train() or "
                "ElasticLoop (docs/migrating.md)"
            )
