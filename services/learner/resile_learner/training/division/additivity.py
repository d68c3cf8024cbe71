"""Whether a model computes the rows of a batch independently of each other, so that its calls can be divided."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .losses import SUM, Divisor, combined, shares, terms_of
from .rows import Cut

Compute = Callable[[slice, int], Sequence[Tensor]]
"""Computes the outputs for some rows with some seed."""


def differences(model: nn.Module, compute: Compute, rows: slice) -> list[str]:
    """Compare the outputs of ``rows`` with those of their halves, in evaluation mode; return a line for each kind.

    There BatchNorm and dropout do not mix rows. Nothing is found where the model draws random numbers nevertheless.
    """
    cut = Cut(rows.stop - rows.start, 2)
    halves = [slice(rows.start + half.start, rows.start + half.stop) for half in map(cut.rows, range(2))]
    with _evaluating(model):
        whole, again = compute(rows, 0), compute(rows, 1)
        if not all(map(_is_close, whole, again)) or any(each.dim() and len(each) != cut.num_rows for each in whole):
            return []
        parts = [compute(half, 0) for half in halves]
    found = {}
    for output, *of_parts in zip(whole, *parts, strict=True):
        joined = torch.cat(of_parts) if output.dim() else _combined(output, of_parts, cut)
        if output.is_floating_point() and not _is_close(output, joined):
            kind, most = _ROWS if output.dim() else _SINGLE, output.detach().abs().max()
            found[kind] = kind.format(size=float((output - joined).detach().abs().max()), most=float(most))
    return list(found.values())


_ROWS = (
    "what the model computes for a sample depends on the other samples of its batch (a difference of {size:.1e} in "
    "outputs of up to {most:.1e}), and it is computed for a part of the batch at a time: this is not what the plain "
    "script computes. If the first dimension of its inputs is not that of the batch, put it first (batch_first=True in "
    "layers of PyTorch); if samples are compared with each other in the model, do that in the body of the loop; or "
    "compute the call in full on each worker, in `with resile.training.undivided():`"
)
_SINGLE = (
    "a single value that the model returns for a batch, such as its loss, is not what those of its parts combine to (a "
    "difference of {size:.1e} in {most:.1e}): this is not what the plain script computes. Return what has a row for "
    "each sample, and compute the value in the body of the loop; or compute the call in full on each worker, in `with "
    "resile.training.undivided():`"
)


def _combined(whole: Tensor, parts: Sequence[Tensor], cut: Cut) -> Tensor:
    if not whole.is_floating_point():
        return whole
    of_whole = terms_of(whole)

    def resolved(part: Tensor) -> list[float]:
        """The terms of a part, in which a divisor that the whole has too does not depend on rows."""
        pairs = zip(terms_of(part), of_whole, strict=False)
        return [SUM if isinstance(term, Divisor) and term == other else term for term, other in pairs]

    terms = [resolved(part) for part in parts]
    return combined(parts, shares(terms, parts, cut))


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs are equal but for rounding; NaN is equal to itself."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    scale = float(one.detach().abs().nan_to_num().max()) if one.numel() else 0.0
    return torch.allclose(one.double(), other.double(), rtol=0, atol=tolerance * scale, equal_nan=True)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
