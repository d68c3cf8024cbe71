"""Hooks that a script has registered on parameters: they get the gradient of a whole call, and not that of a shard."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..gradients import GradientHook


class ParameterHooks:
    """The hooks of ``parameters``, but for those of Resile."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._before: list[Any] = [each._backward_hooks for each in parameters]
        self._after: list[Any] = [each._post_accumulate_grad_hooks for each in parameters]

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """In this context none of them is called."""
        for parameter, before, after in zip(self._parameters, self._before, self._after, strict=True):
            if before:
                parameter._backward_hooks = None
            if len(after) > 1:
                own = OrderedDict((key, hook) for key, hook in after.items() if isinstance(hook, GradientHook))
                parameter._post_accumulate_grad_hooks = own
        try:
            yield
        finally:
            for parameter, before, after in zip(self._parameters, self._before, self._after, strict=True):
                if before:
                    parameter._backward_hooks = before
                if len(after) > 1:
                    parameter._post_accumulate_grad_hooks = after

    def replaced(self, number: int, gradient: Tensor) -> Tensor:
        """Return what the hooks of a parameter make of its gradient, which stays as it is."""
        if not self._before[number]:
            return gradient
        gradient = gradient.clone()
        for hook in list(self._before[number].values()):
            result = hook(gradient)
            gradient = gradient if result is None else result
        return gradient

    def follow(self, used: Sequence[bool]) -> None:
        """Call the hooks of those parameters whose gradients were added."""
        for parameter, after, is_used in zip(self._parameters, self._after, used, strict=True):
            for hook in list(after.values()) if is_used else ():
                if not isinstance(hook, GradientHook):
                    hook(parameter)
