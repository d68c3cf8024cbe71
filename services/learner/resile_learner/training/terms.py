"""How single values that shards compute, such as losses, combine to that of all rows.

The graph of a value shows what it is: a sum, or a mean with the number of its elements or with weights of its own, such
as the targets that `cross_entropy` does not ignore. Where that is not certain, a model's call cannot be divided.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CONSTANT, MEAN, WEIGHTED_MEAN, SUM, SCALED_SUM, UNKNOWN = range(6)
"""Kinds of terms. The elements of a mean belong to rows alike; those of a weighted mean may be more or less by row.

A scaled sum was multiplied or divided by numbers, which may be counts of rows: its weight is the last whole divisor.
"""


class Term(NamedTuple):
    """One term of a single value, as a shard has it."""

    kind: float
    weight: float = 0.0
    """The weights of a mean, added up."""
    factor: float = 1.0
    """What it was multiplied by, which must be the same in all shards."""


MEAN_REDUCTION, _SUM_REDUCTION = 1, 2
"""Values of ``_saved_reduction``."""
NLL = "NllLossBackward0"
"""The last operation of `cross_entropy` and `nll_loss`."""
_SAME = ("ToCopy", "View", "Squeeze", "Unsqueeze", "Clone", "Alias", "Reshape", "UnsafeView", "Expand")
NEAR = 40
"""So many nodes below a mean tell whether elements are selected just before it."""
_OF_MASKS = (torch.float32, torch.float16, torch.bfloat16)
_LEAST_WEIGHT = 1e-5
"""Smaller divisors avoid a division by 0."""
_SELECTING = ("IndexBackward", "MaskedSelect", "Take")
_OF_DATA = ("Embedding", "Index", "Gather")
"""Operations on data that their graph does not show."""


def terms_of(value: Tensor, *, most: int = 1 << 30) -> list[Term]:
    """Return what ``value``, which one shard has computed, consists of, by ``most`` nodes below each of its terms."""
    if value.grad_fn is None:
        return [Term(CONSTANT)]
    if (weight := getattr(value, "_resile_weight", None)) is not None:
        return [Term(WEIGHTED_MEAN, weight)]
    terms = sorted(set(_terms(value.grad_fn, most))) or [Term(CONSTANT)]
    may_be_empty = value.grad_fn.name() != NLL and any(
        term.kind == WEIGHTED_MEAN and term.weight <= 1 for term in terms
    )
    if may_be_empty and not value:
        return [term._replace(weight=0.0) for term in terms]  # a sum of nothing, divided by what avoids a 0
    return terms


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
    if first is None or any(each is None or not is_close(each, first) for each in found):
        return None
    kinds = {term.kind for term in terms[0]}
    return None if kinds >= {CONSTANT, SUM} else first


def _shares(term: Sequence[Term]) -> list[float] | None:
    if len({each.factor for each in term}) != 1 or term[0].kind in (SCALED_SUM, UNKNOWN):
        return None
    if term[0].kind == SUM:
        return [1.0] * len(term)
    total = sum(each.weight for each in term)
    return [each.weight / total if total else float("nan") for each in term]


def is_close(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether numbers are equal but for rounding."""
    pairs = zip(one, other, strict=True)
    return all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-8) or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def combined(values: Sequence[Tensor], counted: Sequence[float]) -> Tensor:
    """Return the value of the batch; what does not count may be NaN."""
    if not values[0].is_floating_point():
        return values[0]
    of_shards = torch.stack([each.double().cpu() for each in values])
    by = torch.tensor(counted, dtype=torch.float64)
    return torch.where(by == 0, 0, of_shards * by).sum().to(values[0])


def _terms(node: Any, most: int) -> Iterator[Term]:
    """Return the terms below ``node``, which computes a single value, looking at ``most`` nodes below each."""
    name = node.name().removesuffix("Backward0")
    operands = [operand for operand, _ in node.next_functions]
    reduction = getattr(node, "_saved_reduction", None)
    if name.startswith("NllLoss") and reduction == MEAN_REDUCTION:
        mixes = _Below(node, min(most, NEAR)).mixes_rows
        yield Term(UNKNOWN) if mixes else Term(WEIGHTED_MEAN, float(node._saved_total_weight))
    elif reduction is not None:
        is_mean = reduction != _SUM_REDUCTION
        yield _mean(_Below(node, most), node._saved_self.numel()) if is_mean else Term(SUM)
    elif name in ("Add", "Sub", *_SAME):
        for operand in operands:
            yield from [Term(CONSTANT)] if operand is None else _terms(operand, most)
    elif name == "Neg":
        yield from _scaled(_terms(operands[0], most), -1.0)
    elif name == "RsubBackward1":  # a number less the value
        yield from (*_scaled(_terms(operands[0], most), -1.0), Term(CONSTANT))
    elif name in ("MulBackward1", "DivBackward1"):  # by a number, in PyTorch's own functions
        by = float(node._saved_other)
        terms = list(_terms(operands[0], most))
        yield from _multiplied(terms, by) if name == "MulBackward1" else _divided_by_number(terms, by)
    elif name in ("Mul", "Div") and len(operands) == 2:
        yield from _products(name, node, operands, most)
    else:
        yield _of_elements(name, node, most)


def _mean(below: "_Below", num_elements: int) -> Term:
    return Term(WEIGHTED_MEAN if below.selects else MEAN, float(num_elements))


def _of_elements(name: str, node: Any, most: int) -> Term:
    """The term of a value that is computed from many others."""
    below = _Below(node, most)
    if not below.depends_on_data:
        return Term(CONSTANT)
    if name in ("SumBackward1", "MeanBackward1") and _has_all_dimensions(node):
        name = name.removesuffix("Backward1")
    if below.mixes_rows or name not in ("Sum", "Mean"):
        return Term(UNKNOWN)
    return Term(SUM) if name == "Sum" else _mean(below, node._saved_self_sym_numel)


def _products(name: str, node: Any, operands: Sequence[Any], most: int) -> Iterator[Term]:
    """The terms of a product or quotient of two operands."""
    left, right = operands
    by = node._saved_other if right is None else node._saved_self if left is None else None
    if by is None or by.dim():
        factors = [[Term(UNKNOWN)] if operand is None else list(_terms(operand, most)) for operand in (left, right)]
        if factors[1] == [Term(CONSTANT)] and by is None:  # what parameters alone determine
            yield from factors[0]
        elif factors[0] == [Term(CONSTANT)] and by is None and name == "Mul":
            yield from factors[1]
        else:
            yield Term(UNKNOWN)
    elif name == "Mul":
        yield from _multiplied(list(_terms(left or right, most)), float(by))
    elif left is None:
        yield Term(UNKNOWN)
    else:
        yield from _divided(list(_terms(left, most)), by)


def _multiplied(terms: Sequence[Term], by: float) -> Iterator[Term]:
    """The terms of a product with a number, which for a sum may be one by the number of rows."""
    return (_scaled_sum(term) if term.kind == SUM else term for term in _scaled(terms, by))


def _divided_by_number(terms: Sequence[Term], by: float) -> Iterator[Term]:
    for term in _scaled(terms, 1.0 / by if by else math.inf):
        is_sum = term.kind in (SUM, SCALED_SUM)
        yield _scaled_sum(term, by if by == round(by) else term.weight) if is_sum else term


def _scaled_sum(term: Term, divisor: float = 0.0) -> Term:
    return term._replace(kind=SCALED_SUM, weight=divisor)


def _divided(terms: Sequence[Term], by: Tensor) -> Iterator[Term]:
    """The terms of a quotient: a sum divided by a tensor, such as the sum of a mask, is a mean.

    A number, which is a double here, may be a count of rows or not; a small one may be there to avoid a division by 0.
    """
    if all(term.kind != SUM for term in terms) or by.dtype not in _OF_MASKS:
        yield from _divided_by_number(terms, float(by))
    elif terms == [Term(SUM)] and by.dtype in _OF_MASKS and (float(by) >= 1.0 or float(by) < _LEAST_WEIGHT):
        yield Term(WEIGHTED_MEAN, float(by))
    else:
        yield Term(UNKNOWN)


def _scaled(terms: Iterable[Term], factor: float) -> Iterator[Term]:
    return (term._replace(factor=term.factor * factor) for term in terms)


class _Below:
    """What is below a node of the graph, down to the parameters or as far as ``most`` nodes reach."""

    def __init__(self, node: Any, most: int, *, looks_at_pairs: bool = True) -> None:
        self.depends_on_data = False
        self.mixes_rows = False
        """Whether something goes through all rows, as the mean over the first dimension."""
        self.selects = False
        """Whether elements are selected, of which rows may have more or less."""
        found = [operand for operand, _ in node.next_functions]
        seen: set[Any] = set()
        while found:
            if len(seen) == most:
                self.depends_on_data = True
                break
            each = found.pop()
            if each is None or each.name().startswith(_OF_DATA):
                self.depends_on_data = True
            if each is None or each in seen:
                continue
            seen.add(each)
            variable = getattr(each, "variable", None)
            self.depends_on_data |= not isinstance(variable, nn.Parameter | None)
            self.selects |= each.name().startswith(_SELECTING)
            self.mixes_rows |= each.name().startswith(_THROUGH_DIMENSION) and _has_first_dimension(each)
            if looks_at_pairs and each.name().startswith(_OF_PAIRS):
                self.mixes_rows |= _compares_rows(each)
            found += [operand for operand, _ in each.next_functions]


_THROUGH_DIMENSION = (
    *("Mean", "Sum", "Nansum", "Std", "Var", "Max", "Min", "Amax", "Amin", "Median", "Prod", "Logsumexp", "Softmax"),
    *("LogSoftmax", "Norm", "LinalgVectorNorm", "Cumsum", "Cumprod", "Stack", "Sort", "Topk"),
)
_OF_PAIRS = ("Mm", "Cdist")


def _compares_rows(node: Any) -> bool:
    """Whether a product or distance of two matrices is a square one of what depends on data, as of rows with rows."""
    if node.name().startswith("Mm"):
        is_square = node._saved_self_sym_sizes[:1] == node._saved_mat2_sym_sizes[1:]
    else:
        is_square = node._saved_x1.dim() == 2 and len(node._saved_x1) == len(node._saved_x2)
    operands = [operand for operand, _ in node.next_functions]
    return is_square and all(
        operand is None or _Below(operand, NEAR, looks_at_pairs=False).depends_on_data for operand in operands[:2]
    )


def _has_first_dimension(node: Any) -> bool:
    """Whether an operation goes through the first dimension, or through all, as far as is known."""
    if "Pool" in node.name():
        return False
    dims = getattr(node, "_saved_dim", None)
    if dims is None:
        return True
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return any(dim == 0 or (sizes is not None and dim == -len(sizes)) for dim in _signed(dims))


def _has_all_dimensions(node: Any) -> bool:
    """Whether a sum or mean over dimensions goes through all of them: None and () stand for all."""
    num_dims = len(node._saved_self_sym_sizes)
    return not (node._saved_dim and num_dims) or len({dim % num_dims for dim in _signed(node._saved_dim)}) == num_dims


def _signed(dims: Any) -> list[int]:
    return [dim - (1 << 64) if dim >= 1 << 63 else dim for dim in (dims if isinstance(dims, tuple) else (dims,))]
