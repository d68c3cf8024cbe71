"""Whether a Trainer's loss is divided by the number of items of the whole batch, or is a mean by itself."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from resile.training.extend import LossIsASum, seeded
from resile_shared.errors import UsageError

TOLERANCE = 1e-3
SUM_TOLERANCE = 0.05

ComputeLoss = Callable[[Mapping[str, Any], int], Any]
"""A function that returns the loss of prepared inputs, given a number of items."""


def divides_by_items(
    model: nn.Module, compute_loss: ComputeLoss, inputs: Mapping[str, Any], doubled: Mapping[str, Any]
) -> bool:
    """Whether ``compute_loss`` divides a sum by the number of items that it is told; else it is a mean by itself.

    It is told one number and twice that. ``doubled`` are the same samples, each twice. The model computes in eval mode,
    so that nothing is random, and no buffer changes. Raises UsageError for a loss of which neither is true.
    """

    def loss(inputs: Mapping[str, Any], num_items: int) -> float:
        return float(compute_loss(copy.copy(inputs), num_items))

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), seeded(0):
            once, of_more_items, of_more_samples = loss(inputs, 64), loss(inputs, 128), loss(doubled, 64)
    finally:
        for module, mode in modes:
            module.training = mode
    if not 0.0 < abs(once) < float("inf"):
        raise UsageError(
            f"the loss of the first samples of the training dataset is {once}, which does not tell whether it is a "
            "mean: put samples first that have labels"
        )
    if _is_close(once / 2, of_more_items, TOLERANCE):
        return True
    if not _is_close(once, of_more_items, TOLERANCE):
        raise UsageError(
            f"a part of the loss is divided by num_items_in_batch, and a part is not (it is {once:.4g} for 64 items "
            f"and {of_more_items:.4g} for 128), so that shards cannot be weighted: override compute_loss so that it "
            "calls super().compute_loss(model, inputs, return_outputs), without num_items_in_batch"
        )
    if _is_close(2 * once, of_more_samples, SUM_TOLERANCE):
        raise LossIsASum(f"it is {once:.4g}, and {of_more_samples:.4g} for the same batch twice over")
    return False


def _is_close(expected: float, value: float, tolerance: float) -> bool:
    return abs(value - expected) <= tolerance * abs(expected)
