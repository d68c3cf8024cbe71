"""Detects a plain run that another launcher has started several times: each process would train by itself."""

import os
from collections.abc import Mapping

import torch.distributed

from resile_shared.errors import UsageError

_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""The variables in which torchrun, Open MPI, MPICH and MVAPICH give the number of processes they have started."""


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
