"""How single values that a model returns, such as its loss, combine: from what each shard has, that of all rows.

The graph of a loss shows what it is: a mean over rows, a sum, or a mean with weights of its own, such as the targets
that `cross_entropy` does not ignore. Values without a graph count as means over rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from resile_shared.errors import UsageError

from .rows import Cut, weight

ROWS = -1.0
"""A mean over rows: a shard counts by its rows."""
SUM = -2.0
"""A sum over rows. Any other number is the sum of the weights of a mean."""


class Divisor(float):
    """What a sum over rows was divided by: the weights of a mean, or a number that has nothing to do with rows."""


_MEAN, _SUM = 1, 2
"""Values of ``_saved_reduction``."""
_SAME = ("ToCopy", "View", "Squeeze", "Unsqueeze", "Clone", "Alias", "Reshape", "UnsafeView", "Neg", "Expand")
_OF_DATA = ("Embedding", "Index", "Gather")
"""Operations on data that their graph does not show."""


def terms_of(value: Tensor) -> list[float]:
    """Return how the terms of ``value``, which one shard has computed, combine: `ROWS`, `SUM`, or weights."""
    found = set(_terms(value.grad_fn)) if value.grad_fn is not None else set()
    return sorted(found) or [ROWS]


def shares(terms: Sequence[Sequence[float]], values: Sequence[Tensor], cut: Cut) -> list[float]:
    """Return by how much the value of each shard counts in that of the batch, from the `terms_of` each.

    Raises UsageError if its terms would count differently.
    """
    rows = [weight(cut, shard) for shard in range(cut.num_shards)]
    is_constant = all(torch.equal(each, values[0]) for each in values)  # a penalty on parameters is no sum of rows
    found = []
    for term in zip(*terms, strict=True) if len({len(each) for each in terms}) == 1 else ():
        if term[0] == ROWS or (term[0] == SUM and is_constant):
            found.append(rows)
        elif term[0] == SUM:
            found.append([1.0] * cut.num_shards)
        else:
            total = sum(term)
            found.append([each / total if total else float("nan") for each in term])
    if not found or any(not torch.allclose(torch.tensor(each), torch.tensor(found[0])) for each in found):
        raise UsageError(
            "a loss that the model computes adds terms that combine differently, such as a mean and a sum over rows, "
            "or means with different weights: it cannot be divided as one value. Return the terms one by one and add "
            "them in the body of the loop, or compute the loss there, from outputs with a row for each of the batch"
        )
    return found[0]


def combined(values: Sequence[Tensor], counted: Sequence[float]) -> Tensor:
    """Return the value of the batch; what does not count may be NaN. Raises UsageError for differing integers."""
    if not values[0].is_floating_point():
        if any(not torch.equal(each, values[0]) for each in values):
            raise UsageError(
                f"an output of the model is a single {values[0].dtype}, which differs between parts of a batch, and it "
                "cannot be known whether it is a sum: return a value for each row, and add them up in the body"
            )
        return values[0]
    of_shards = torch.stack([each.double().cpu() for each in values])
    shares_ = torch.tensor(counted, dtype=torch.float64)
    return torch.where(shares_ == 0, 0, of_shards * shares_).sum().to(values[0])


def _terms(node: Any) -> Iterator[float]:
    """Return the terms below ``node``, which computes a single value; none for what is equal in all shards."""
    name = node.name().removesuffix("Backward0").removesuffix("Backward1")
    operands = [operand for operand, _ in node.next_functions]
    reduction = getattr(node, "_saved_reduction", None)
    if name.startswith("NllLoss") and reduction == _MEAN:
        yield float(node._saved_total_weight)
    elif reduction is not None:
        yield SUM if reduction == _SUM else ROWS
    elif name in ("Add", "Sub", *_SAME):
        for operand in operands:
            if operand is not None:
                yield from _terms(operand)
    elif name == "Mul":
        factors = [list(_terms(operand)) for operand in operands if operand is not None]
        yield from [term for terms in factors for term in terms] if sum(map(bool, factors)) < 2 else [ROWS]
    elif name == "Div" and operands[1:] == [None] and operands[0] is not None:
        below = list(_terms(operands[0]))
        yield from [Divisor(node._saved_other)] if below == [SUM] else below
    elif _depends_on_data(node):  # if not a sum: a mean, or what is not known to be something else
        yield SUM if name == "Sum" else ROWS


def _depends_on_data(node: Any) -> bool:
    """Whether anything below ``node`` is not made of parameters alone."""
    found, seen = [node], set()
    while found:
        each = found.pop()
        variable = getattr(each, "variable", None)
        if each is None or each.name().startswith(_OF_DATA) or not isinstance(variable, nn.Parameter | None):
            return True
        if each not in seen:
            seen.add(each)
            found += [operand for operand, _ in each.next_functions]
    return False


class Divisors(TorchFunctionMode):
    """While it is entered, notes the numbers by which single values are divided, and not the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: set[float] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DIVIDE and len(args) == 2 and isinstance(args[0], Tensor) and not args[0].dim():
            self.numbers |= {float(each) for each in args[1:] if isinstance(each, int | float)}
        return func(*args, **(kwargs or {}))


_DIVIDE = frozenset({Tensor.div, Tensor.__truediv__, Tensor.true_divide, torch.div, torch.true_divide})
