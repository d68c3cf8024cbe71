"""The learning rate of a batch that is larger or smaller than that of the training call."""

from collections.abc import Callable
from math import sqrt
from typing import Any, Literal

import torch

LearningRateRule = Literal["linear", "sqrt", "none"]
_FACTORS: dict[LearningRateRule, Callable[[float], float]] = {
    "linear": lambda ratio: ratio,  # Goyal et al., arXiv:1706.02677
    "sqrt": sqrt,  # for adaptive optimizers: Malladi et al., arXiv:2205.10287
    "none": lambda ratio: 1.0,
}
RULES = tuple(_FACTORS)


class LearningRateScale:
    """Multiplies the learning rates of ``optimizer`` during each of its steps, and only then.

    Schedules, checkpoints and scripts see the rates of the training call's batch, so that a schedule that computes a
    rate from the one before does not scale it twice. ``ratio()`` is the batch divided by that of the training call.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rule: LearningRateRule, ratio: Callable[[], float]) -> None:
        self._optimizer = optimizer
        self._factor_of = _FACTORS[rule]
        self._ratio = ratio
        self._rates: list[Any] = []
        """The learning rates to restore after a step."""
        optimizer.register_step_pre_hook(self._scale)
        optimizer.register_step_post_hook(self._restore)

    def _scale(self, *arguments: object) -> None:
        self._restore()  # if the step before raised
        factor = self._factor_of(self._ratio())
        if factor != 1.0:
            self._rates = [group["lr"] for group in self._optimizer.param_groups]
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def _restore(self, *arguments: object) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []
