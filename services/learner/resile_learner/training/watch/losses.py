"""Refuses losses that are wrong: a sum over the batch, although shards are weighted by their samples, or NaN."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from resile_shared.errors import ResileError, UsageError

_SUM = 2  # at::Reduction::Sum
_OF_MASKS = (torch.float32, torch.float16, torch.bfloat16)
_HALF = 2.0
TOLERANCE = 0.05
MAX_TERMS = 100


class LossIsASum(UsageError):
    """The loss grows with the number of samples in its batch."""

    def __init__(self, how: str) -> None:
        super().__init__(
            f"the loss is a sum over its batch, not a mean ({how}), and shards are weighted by their samples already: "
            'compute the mean, as by reduction="mean"; or, if it is divided by the sum of a mask, say so by '
            "`resile.training.weigh(mask.sum())`"
        )


class NotANumber(ResileError):
    """The loss became NaN."""

    def __init__(self, iteration: int) -> None:
        super().__init__(
            f"the loss is NaN at iteration {iteration}, which was not committed: look at the samples of this batch, "
            "lower the learning rate, or clip gradients. Where a shard may have nothing to average, as with a mask, "
            "say what its mean counts: `resile.training.weigh(mask.sum())`"
        )


class LossIsDivided(UsageError):
    """The loss is divided by the number of batches that make up an iteration, over which gradients are averaged."""

    def __init__(self, divisor: int) -> None:
        super().__init__(
            f"the loss is divided by {divisor}, the number of batches that make up an iteration, but their gradients "
            f"are averaged already, so that parameters would change {divisor} times less: remove `/ {divisor}` from "
            f"the loss (if it is meant to be so small, multiply it by {1 / divisor:.4g} instead)"
        )


def check_not_divided(loss: Tensor, *, accumulate: int) -> None:
    """Raises LossIsDivided if ``loss`` is divided by ``accumulate``, unless it is the mean of that many losses."""
    node = loss.grad_fn
    if node is None or node.name() != "DivBackward0":
        return
    if accumulate > 1 and _divisor(node) == accumulate and len(list(_terms(node.next_functions[0][0]))) != accumulate:
        raise LossIsDivided(accumulate)


def check_not_summed(loss: Tensor, *, num_samples: int, batch_size: int) -> None:
    """Look at the last operations of ``loss``. Raises LossIsASum for a sum over samples, or over parts of them.

    Of several terms that are added, one with ``reduction="sum"`` over a row for each sample is enough; a ``.sum()`` may
    be that of a penalty. A sum that is divided may be a mean, unless it is divided by 2, or by the number of samples,
    rows or elements of the whole batch, which has ``batch_size`` samples, while the shard has ``num_samples``.
    """
    node: Any = loss.grad_fn
    if node is None:
        return
    if (divisor := _divisor(node)) is not None:
        _check_divisor(divisor, _summed_counts(node.next_functions[0][0], num_samples), num_samples, batch_size)
    if getattr(node, "_saved_reduction", None) == _SUM:
        raise LossIsASum(f'{node.name()} with reduction="sum"')
    if node.name() == "SumBackward0" and _sums_samples(node, num_samples):
        raise LossIsASum("it ends with .sum()")
    for term in _terms(node):
        if getattr(term, "_saved_reduction", None) == _SUM and _has_rows(term, num_samples):
            raise LossIsASum(f'{term.name()} with reduction="sum" is one of its terms')


def _check_divisor(divisor: float, counts: list[int], num_samples: int, batch_size: int) -> None:
    """Raises LossIsASum if a sum over ``counts`` is halved, or divided by what belongs to the whole batch."""
    if divisor in counts or not counts:
        return
    if divisor == _HALF:
        raise LossIsASum("it is half of a sum")
    if divisor in [count * batch_size / num_samples for count in counts]:
        raise LossIsASum(
            f"it is divided by {divisor:g}, which belongs to the whole batch of {batch_size} samples, while the loop "
            f"gets shards, here one of {num_samples}"
        )


def _divisor(node: Any) -> float | None:
    """What a value is divided by in its last operation, or the inverse of its factor, if that is a number."""
    if node is None or node.name() not in ("DivBackward0", "MulBackward0"):
        return None
    other = getattr(node, "_saved_other", None)
    if not isinstance(other, Tensor) or other.numel() != 1 or other.requires_grad or not other:
        return None
    if other.dtype in _OF_MASKS:  # the sum of a mask, and no number of the script
        return None
    return float(other) if node.name() == "DivBackward0" else round(1 / float(other), 6)


def _summed_counts(node: Any, num_samples: int) -> list[int]:
    """The numbers of samples, rows and elements over which ``node`` sums; none if it does not sum over samples."""
    if node is None:
        return []
    if node.name() == "SumBackward0" and _sums_samples(node, num_samples):
        sizes = node._saved_self_sym_sizes
    elif getattr(node, "_saved_reduction", None) == _SUM and _has_rows(node, num_samples):
        sizes = node._saved_self.shape
    else:
        return []
    num_terms = sizes[0] if node.name().startswith("NllLoss") else math.prod(sizes)  # one for each row of classes
    return [num_samples, sizes[0], num_terms]


def _terms(node: Any) -> Iterator[Any]:
    """What is added and subtracted to make a value."""
    waiting = [node]
    for _ in range(MAX_TERMS):
        if not waiting:
            return
        term = waiting.pop()
        if term is not None and term.name() in ("AddBackward0", "SubBackward0"):
            waiting += [source for source, _ in term.next_functions]
        elif term is not None:
            yield term


def _has_rows(node: Any, num_samples: int) -> bool:
    """Whether the input of a loss has a row for each sample, or several, and is not a parameter."""
    source = node.next_functions[0][0]
    rows = getattr(node, "_saved_self", None)
    if source is None or source.name() == "AccumulateGrad" or rows is None or not rows.ndim:
        return False
    return len(rows) >= num_samples > 1 and len(rows) % num_samples == 0


def _sums_samples(node: Any, num_samples: int) -> bool:
    """Whether the summed tensor has a row for each sample, or several; a stack of several losses does not."""
    source = node.next_functions[0][0]
    if source is None or source.name() == "StackBackward0":
        return False
    sizes = node._saved_self_sym_sizes
    return bool(sizes) and sizes[0] >= num_samples > 1 and sizes[0] % num_samples == 0


@torch.no_grad()
def check_is_mean(loss_fn: Callable[[Any, Any], Tensor], outputs: Any, targets: Any, loss: Tensor) -> None:
    """Compute ``loss`` again, of the same batch twice over: a mean stays, a sum doubles. Raises LossIsASum."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.ndim and targets.ndim):
        return
    if loss.numel() != 1:
        return
    once = float(loss)
    twice = float(loss_fn(torch.cat([outputs, outputs]), torch.cat([targets, targets])))
    if once != 0.0 and abs(twice / once - 2.0) < TOLERANCE:
        raise LossIsASum(f"it is {once:.4g}, and {twice:.4g} for the same batch twice over")
