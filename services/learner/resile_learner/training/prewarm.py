"""Touches the memory of an optimizer's first step before a worker joins."""

import copy
from contextlib import suppress

import torch


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
