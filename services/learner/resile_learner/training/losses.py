"""What is wrong with a loss: it is a sum over its batch, although shards are weighted by their samples, or NaN."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from resile_shared.errors import ResileError, UsageError

_SUM = 2  # at::Reduction::Sum
TOLERANCE = 0.05
MAX_TERMS = 100


class LossIsASum(UsageError):
    """The loss grows with the number of samples in its batch."""

    def __init__(self, how: str) -> None:
        super().__init__(
            f"the loss is a sum over its batch, not a mean ({how}), and shards are weighted by their samples already: "
            'compute the mean, as by reduction="mean"'
        )


class NotANumber(ResileError):
    """The loss became NaN."""

    def __init__(self, iteration: int) -> None:
        super().__init__(
            f"the loss is NaN at iteration {iteration}, which was not committed: look at the samples of this batch, "
            "lower the learning rate, or clip gradients"
        )


def check_not_summed(loss: Tensor, *, num_samples: int) -> None:
    """Look at the last operation of ``loss``. Raises LossIsASum for a sum over samples, or over parts of them.

    Of several terms that are added, one with ``reduction="sum"`` over a row for each sample is enough; a ``.sum()`` may
    be that of a penalty. A sum that is scaled afterwards is not found: what it is scaled by may make it a mean.
    """
    node: Any = loss.grad_fn
    if node is None:
        return
    if getattr(node, "_saved_reduction", None) == _SUM:
        raise LossIsASum(f'{node.name()} with reduction="sum"')
    if node.name() == "SumBackward0" and _sums_samples(node, num_samples):
        raise LossIsASum("it ends with .sum()")
    for term in _terms(node):
        if getattr(term, "_saved_reduction", None) == _SUM and _has_rows(term, num_samples):
            raise LossIsASum(f'{term.name()} with reduction="sum" is one of its terms')


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
    """Whether the input of a loss has a row for each sample, or several, and is no parameter."""
    source = node.next_functions[0][0]
    rows = getattr(node, "_saved_self", None)
    if source is None or source.name() == "AccumulateGrad" or rows is None or not rows.ndim:
        return False
    return len(rows) >= num_samples > 1 and len(rows) % num_samples == 0


def _sums_samples(node: Any, num_samples: int) -> bool:
    """Whether the summed tensor has a row for each sample, or several; a stack of several losses has not."""
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
