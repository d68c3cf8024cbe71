"""How single values that a model returns, such as its loss, combine: from what each shard has, that of all rows.

The graph of a value shows what it is: a sum, or a mean with the number of its elements or with weights of its own, such
as the targets that `cross_entropy` does not ignore. Where that is not certain, the call cannot be divided.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CONSTANT, MEAN, SUM, UNKNOWN = range(4)


class Term(NamedTuple):
    """One term of a single value, as a shard has it."""

    kind: float
    weight: float = 0.0
    """The weights of a mean, added up."""
    factor: float = 1.0
    """What it was multiplied by, which must be the same in all shards."""


_MEAN_REDUCTION, _SUM_REDUCTION = 1, 2
"""Values of ``_saved_reduction``."""
_SAME = ("ToCopy", "View", "Squeeze", "Unsqueeze", "Clone", "Alias", "Reshape", "UnsafeView", "Expand")
_OF_DATA = ("Embedding", "Index", "Gather")
"""Operations on data that their graph does not show."""


def terms_of(value: Tensor) -> list[Term]:
    """Return what ``value``, which one shard has computed, consists of."""
    if value.grad_fn is None:
        return [Term(CONSTANT)]
    return sorted(set(_terms(value.grad_fn))) or [Term(CONSTANT)]


def shares(terms: Sequence[Sequence[Term]], values: Sequence[Tensor], rows: Sequence[float]) -> list[float] | None:
    """Return by how much the value of each shard counts in that of the batch; None if that is not certain.

    ``terms`` are the `terms_of` each, and ``rows`` the shares of the rows that the shards have.
    """
    if len({tuple(term.kind for term in each) for each in terms}) != 1:
        return None
    found = [_shares(term) for term in zip(*terms, strict=True) if term[0].kind != CONSTANT]
    if not found:
        return list(rows) if all(torch.equal(each, values[0]) for each in values) else None
    first = found[0]
    if first is None or any(each is None or not _is_close(each, first) for each in found):
        return None
    has_constant = any(term.kind == CONSTANT for term in terms[0])
    return None if has_constant and terms[0][-1].kind == SUM else first


def _shares(term: Sequence[Term]) -> list[float] | None:
    if len({each.factor for each in term}) != 1 or term[0].kind == UNKNOWN:
        return None
    if term[0].kind == SUM:
        return [1.0] * len(term)
    total = sum(each.weight for each in term)
    return [each.weight / total if total else float("nan") for each in term]


def _is_close(one: Sequence[float], other: Sequence[float]) -> bool:
    return torch.allclose(torch.tensor(one), torch.tensor(other), equal_nan=True)


def combined(values: Sequence[Tensor], counted: Sequence[float]) -> Tensor:
    """Return the value of the batch; what does not count may be NaN."""
    if not values[0].is_floating_point():
        return values[0]
    of_shards = torch.stack([each.double().cpu() for each in values])
    by = torch.tensor(counted, dtype=torch.float64)
    return torch.where(by == 0, 0, of_shards * by).sum().to(values[0])


def _terms(node: Any) -> Iterator[Term]:
    """Return the terms below ``node``, which computes a single value."""
    name = node.name().removesuffix("Backward0")
    operands = [operand for operand, _ in node.next_functions]
    reduction = getattr(node, "_saved_reduction", None)
    if name.startswith("NllLoss") and reduction == _MEAN_REDUCTION:
        yield Term(MEAN, float(node._saved_total_weight))
    elif reduction is not None:
        yield Term(SUM) if reduction == _SUM_REDUCTION else Term(MEAN, float(node._saved_self.numel()))
    elif name in ("Add", "Sub", *_SAME):
        for operand in operands:
            yield from [Term(CONSTANT)] if operand is None else _terms(operand)
    elif name == "Neg":
        yield from _scaled(operands[0], -1.0)
    elif name == "RsubBackward1":  # a number less the value
        yield from (*_scaled(operands[0], -1.0), Term(CONSTANT))
    elif name in ("Mul", "Div") and len(operands) == 2:
        yield from _products(name, node, *operands)
    else:
        yield _of_elements(name, node)


def _of_elements(name: str, node: Any) -> Term:
    """The term of a value that is computed from many others."""
    below = _Below(node)
    if not below.depends_on_data:
        return Term(CONSTANT)
    if name in ("SumBackward1", "MeanBackward1") and _has_all_dimensions(node):
        name = name.removesuffix("Backward1")
    if below.mixes_rows or name not in ("Sum", "Mean"):
        return Term(UNKNOWN)
    return Term(SUM) if name == "Sum" else Term(MEAN, float(node._saved_self_sym_numel))


def _products(name: str, node: Any, left: Any, right: Any) -> Iterator[Term]:
    """The terms of a product or quotient."""
    by = node._saved_other if right is None else node._saved_self if left is None else None
    if by is None or by.dim():
        factors = [[Term(UNKNOWN)] if operand is None else list(_terms(operand)) for operand in (left, right)]
        if factors[1] == [Term(CONSTANT)] and by is None:  # what parameters alone determine
            yield from factors[0]
        elif factors[0] == [Term(CONSTANT)] and by is None and name == "Mul":
            yield from factors[1]
        else:
            yield Term(UNKNOWN)
    elif name == "Mul":
        yield from _multiplied(left or right, float(by))
    elif left is None:
        yield Term(UNKNOWN)
    else:
        yield from _divided(left, by)


def _multiplied(node: Any, by: float) -> Iterator[Term]:
    """The terms of a product with a number, which for a sum may be one by the number of rows."""
    has_sum = any(term.kind == SUM for term in _terms(node))
    yield from [Term(UNKNOWN)] if has_sum else _scaled(node, by)


def _divided(node: Any, by: Tensor) -> Iterator[Term]:
    """The terms of a quotient: a sum divided by a tensor, such as the sum of a mask, is a mean.

    A number, which is a double here, may be a count of rows or not; a small one may be there to avoid a division by 0.
    """
    below = list(_terms(node))
    if all(term.kind != SUM for term in below):
        yield from _scaled(node, 1.0 / float(by))
    elif below == [Term(SUM)] and by.dtype in (torch.float32, torch.float16, torch.bfloat16) and float(by) > 1.0:
        yield Term(MEAN, float(by))
    else:
        yield Term(UNKNOWN)


def _scaled(node: Any, factor: float) -> Iterator[Term]:
    return (term._replace(factor=term.factor * factor) for term in _terms(node))


class _Below:
    """What is below a node of the graph, down to the parameters."""

    def __init__(self, node: Any) -> None:
        self.depends_on_data = False
        self.mixes_rows = False
        """Whether something goes through all rows, as the mean over the first dimension."""
        found, seen = [operand for operand, _ in node.next_functions], set()
        while found:
            each = found.pop()
            if each is None or each.name().startswith(_OF_DATA):
                self.depends_on_data = True
            if each is None or each in seen:
                continue
            seen.add(each)
            variable = getattr(each, "variable", None)
            self.depends_on_data |= not isinstance(variable, nn.Parameter | None)
            self.mixes_rows |= each.name().startswith(_THROUGH_DIMENSION) and _has_first_dimension(each)
            found += [operand for operand, _ in each.next_functions]


_THROUGH_DIMENSION = (
    *("Mean", "Sum", "Nansum", "Std", "Var", "Max", "Min", "Amax", "Amin", "Median", "Prod", "Logsumexp", "Softmax"),
    *("LogSoftmax", "Norm", "LinalgVectorNorm", "Cumsum", "Cumprod", "Stack", "Sort", "Topk"),
)


def _has_first_dimension(node: Any) -> bool:
    """Whether an operation goes through the first dimension, or through all, as far as is known."""
    dims = getattr(node, "_saved_dim", None)
    if dims is None:
        return True
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return any(dim == 0 or (sizes is not None and dim == -len(sizes)) for dim in _signed(dims))


def _has_all_dimensions(node: Any) -> bool:
    """Whether a sum or mean over dimensions goes through all of them: None and () stand for all."""
    num_dims = len(node._saved_self_sym_sizes)
    return not node._saved_dim or len({dim % num_dims for dim in _signed(node._saved_dim)}) == num_dims


def _signed(dims: Any) -> list[int]:
    return [dim - (1 << 64) if dim >= 1 << 63 else dim for dim in (dims if isinstance(dims, tuple) else (dims,))]
