"""Letting a script's calls act once an iteration, although its loop makes them for each shard."""

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch

from .closures import GATED, Closure, Step


def gate_method(owner: Any, name: str, is_open: Callable[[], bool]) -> None:
    """From now on method ``name`` of ``owner`` does nothing, and returns None, while ``is_open()`` is false.

    For objects whose state leaves out such attributes, as optimizers and scalers do.
    """
    method = getattr(owner, name)

    @wraps(method)
    def gated(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs) if is_open() else None

    setattr(owner, name, gated)


def gate_optimizer(
    optimizer: torch.optim.Optimizer, is_open: Callable[[], bool], run_closure: Callable[[Step, Closure], Any]
) -> None:
    """Gate ``optimizer.step`` in the same way; `LRScheduler` also replaces it like this, and marks it.

    A step with a closure is ``run_closure(step, closure)``, with the optimizer's own step.
    """
    own = optimizer.step
    gate_method(optimizer, "step", is_open)
    gated = optimizer.step

    @wraps(gated)  # with the marks that LRScheduler looks for
    def step(_: torch.optim.Optimizer, closure: Closure | None = None) -> Any:
        return gated() if closure is None else run_closure(own, closure)

    setattr(step, GATED, True)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # a schedule made later replaces methods


def gate_schedule(schedule: Any, is_open: Callable[[], bool]) -> None:
    """Gate ``schedule.step``. Schedules save all their attributes, so their class is replaced by a subclass."""
    kind = type(schedule)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.step(self, *args, **kwargs) if is_open() else None

    schedule.__class__ = type(kind.__name__, (kind,), {"step": step, "__doc__": kind.__doc__})
