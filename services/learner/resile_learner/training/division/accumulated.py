"""Gradients that a body accumulates over several batches: a worker that joins in between needs them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class AccumulatedGradients:
    """The gradients of ``parameters`` between two iterations, as a part of the run's state.

    Most bodies clear them before the first backward pass of each iteration. Where all iterations but the first were
    seen to do so, they are left out.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._is_fresh = True
        """Whether the open iteration has had no backward pass."""
        self._num_begun = 0
        self._num_cleared = 0

    def begin_iteration(self) -> None:
        """An iteration begins."""
        self._is_fresh = True

    def on_backward(self) -> None:
        """The gradients of a backward pass are about to be added."""
        if self._is_fresh:
            self._is_fresh = False
            self._num_begun += 1
            self._num_cleared += not any(_is_set(parameter.grad) for parameter in self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients, by the number of the parameter."""
        if self._num_begun > 1 and self._num_cleared == self._num_begun:
            return {"gradients": {}}
        gradients = {number: each.grad for number, each in enumerate(self._parameters) if _is_set(each.grad)}
        return {"gradients": gradients}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for number, parameter in enumerate(self._parameters):
            gradient = state_dict["gradients"].get(number)
            parameter.grad = None if gradient is None else torch.empty_like(parameter).copy_(gradient)


def _is_set(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())
