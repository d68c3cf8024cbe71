"""Touches memory and loads kernels before a worker joins, so that the others need not wait for it at its first step."""

import copy
from collections.abc import Iterable
from contextlib import suppress

import torch

from ..probe import probe_digest


def prewarm_devices(devices: Iterable[torch.device]) -> None:
    """Take a small step on each accelerator, and discard it.

    It loads the libraries with their kernels, and allocates their workspaces: a process's first step on a GPU takes up
    to seconds for that. It draws no random numbers.
    """
    for device in devices:
        if device.type != "cpu":
            with suppress(RuntimeError):  # an operation that the device lacks
                probe_digest(device)


def prewarm_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Take one step with a copy of ``optimizer`` on gradients of zero, and discard the copy.

    It leaves this process with memory for the optimizer's state and for gradients, which can take longer to touch for
    the first time than the state takes to arrive, and with code loaded that PyTorch loads at a first step. Only
    PyTorch's own optimizers are known to be copied without side effects, and only on the CPU is freed memory reused.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not type(optimizer).__module__.startswith("torch.") or any(p.device.type != "cpu" for p in parameters):
        return
    twin = copy.deepcopy(optimizer)
    for group in twin.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    with suppress(TypeError):  # LBFGS needs a closure
        twin.step()
