"""Memory and kernels of a worker: what it frees is kept, and what its first step needs is ready before it joins.

The others would otherwise wait for a joining worker at its first step.
"""

import copy
import ctypes
import importlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ..probe import probe_digest

with suppress(Exception):  # torch's own, which may lack it, and does without
    importlib.import_module("torch.profiler._cupti_monitor")  # a first step imports it

_M_TRIM_THRESHOLD = -1  # numbers of malloc.h
_M_MMAP_THRESHOLD = -3
_KEPT_BLOCK_BYTES = 32 << 20  # the largest number that glibc takes
_KEPT_BYTES = (1 << 31) - 1  # the largest, too


def keep_freed_memory() -> None:
    """Let glibc's malloc return freed memory to the system only beyond 2 GiB, and blocks of over 32 MiB at once.

    By default activations and gradients go back to the system in each iteration, and come again as thousands of page
    faults: a tenth to a quarter of an iteration. Another C library is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


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
    """Take one step with a copy of ``optimizer`` on its smallest parameter, and touch as much memory as all need.

    It leaves this process with memory for the optimizer's state and for gradients, which can take longer to touch for
    the first time than the state takes to arrive, and with code loaded that PyTorch loads at a first step. Only
    PyTorch's own optimizers are known to be copied without side effects, and only on the CPU is freed memory reused.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_known = type(optimizer).__module__.startswith("torch.")
    if not is_known or any(parameter.device.type != "cpu" for parameter in parameters):
        return
    times = 1
    with suppress(Exception):  # LBFGS needs a closure, SparseAdam sparse gradients; a real step reports other errors
        times += _num_state_tensors(optimizer, parameters)
    _touch(parameters, times=times)


def _num_state_tensors(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> int:
    """Take the step; return how many tensors of the size of the parameter belong to its state."""
    smallest = min(parameters, key=Tensor.numel)
    group = next(group for group in optimizer.param_groups if any(each is smallest for each in group["params"]))
    parameter = smallest.detach().clone()
    parameter.grad = torch.zeros_like(parameter)
    twin = copy.copy(optimizer)
    twin.param_groups = [{**group, "params": [parameter]}]
    twin.state = defaultdict(dict)
    twin.state[parameter] = copy.deepcopy(optimizer.state.get(smallest, {}))  # some make it before the first step
    twin.step()
    state = {name: each for name, each in twin.state[parameter].items() if name != "step"}
    return sum(isinstance(each, Tensor) and each.shape == parameter.shape for each in state.values())


def _touch(parameters: Sequence[Tensor], *, times: int) -> None:
    """Allocate ``times`` times the memory of ``parameters``, write to it, and free it."""
    kept = [parameter for parameter in parameters if parameter.nbytes < _KEPT_BLOCK_BYTES]
    touched = [torch.zeros_like(parameter) for _ in range(times) for parameter in kept]
    touched.clear()
