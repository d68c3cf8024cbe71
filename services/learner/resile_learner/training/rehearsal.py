"""What a joiner does while the others still train without it, so that they wait for it less."""

import copy
from contextlib import suppress

import torch


def rehearse(optimizer: torch.optim.Optimizer) -> None:
    """Take one step with a copy of ``optimizer``, on gradients of zero, and throw the copy away.

    The memory for its state and for gradients is then in this process, where first touching it can take longer than
    receiving the state, and code that loads at a first step is loaded. Only PyTorch's own optimizers are known to be
    copied without consequences, and only on the CPU is memory kept for whoever needs it next.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not type(optimizer).__module__.startswith("torch.") or any(p.device.type != "cpu" for p in parameters):
        return
    twin = copy.deepcopy(optimizer)
    for group in twin.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    with suppress(TypeError):  # LBFGS wants a closure
        twin.step()
