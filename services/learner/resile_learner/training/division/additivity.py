"""Whether a model computes the rows of a batch independently of each other, so that its calls can be divided."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...state.run import registered_buffers
from ..buffer_rules import declaration, filled_slots, is_pointer, known_rule, with_pointers
from ..module_attributes import marked_attributes, restore_attributes, save_attributes
from ..silenced import BATCH_STATISTICS, draws, has_statistics, silenced, uses_batch_statistics
from ..terms import combined, shares, terms_of
from ..watch.changed_buffers import ChangedBuffers
from .rows import Cut, weight

Compute = Callable[[slice, int], Sequence[Tensor]]
"""Computes the outputs for some rows with some seed."""


def differences(model: nn.Module, compute: Compute, rows: slice) -> list[str]:
    """Compare the outputs of ``rows`` with those of their halves; return a line for each kind.

    Dropout and BatchNorm are silenced. Where the model draws other random numbers, it is compared in evaluation mode;
    nothing is found where it draws them there, too.
    """
    cut = Cut(rows.stop - rows.start, 2)
    halves = [slice(rows.start + half.start, rows.start + half.stop) for half in map(cut.rows, range(2))]
    everything = list(model.modules())
    for modules in ([each for each in everything if draws(each) or has_statistics(each)], everything):
        try:
            with silenced(modules):
                whole, again = compute(rows, 0), compute(rows, 1)
                if not all(map(_is_close, whole, again)):
                    continue
                parts = [compute(half, 0) for half in halves]
        except Exception:
            if modules is everything:  # a model that is not meant to be evaluated
                return []
            raise
        found = {}
        for output, *of_parts in zip(whole, *parts, strict=True):
            if len({each.shape[1:] for each in (output, *of_parts)}) > 1:
                return [OTHER_SHAPES.format(one=tuple(output.shape), other=tuple(of_parts[0].shape))]
            joined = torch.cat(of_parts) if output.dim() else _combined(output, of_parts, cut)
            if output.is_floating_point() and not _is_close(output, joined):
                kind, most = _ROWS if output.dim() else _SINGLE, output.detach().abs().max()
                found[kind] = kind.format(size=float((output - joined).detach().abs().max()), most=float(most))
        return list(found.values())
    return []


def counted(model: nn.Module, compute: Compute, rows: slice) -> list[str]:
    """Look whether the model changes buffers without a rule otherwise than by a mean over the rows that it is given."""
    buffers = {name: (module, key) for name, module, key in registered_buffers(model) if not known_rule(module, key)}
    if not buffers:
        return []

    def values() -> dict[str, Tensor]:
        found = {name: module._buffers[key] for name, (module, key) in buffers.items()}
        return {name: value.detach().clone() for name, value in found.items() if value is not None}

    def after(part: slice) -> dict[str, Tensor]:
        compute(part, 0)
        return values()

    cut, before = Cut(rows.stop - rows.start, 2), values()
    halves = [slice(rows.start + half.start, rows.start + half.stop) for half in map(cut.rows, range(2))]
    try:
        whole, parts = after(rows), [after(half) for half in halves]
    except Exception:  # of a model that does not take so few rows
        return []
    rules: dict[str, str] = {}
    for name, value in whole.items():
        began, one, other = before.get(name), *(part.get(name) for part in parts)
        if began is None or one is None or other is None or not value.shape == began.shape == one.shape == other.shape:
            rules[name] = ""
            continue
        rule = _rule_of(value, began, one, other, [weight(cut, 0), weight(cut, 1)])
        if rule != "mean":
            rules[name] = rule
    if not rules:
        return []
    pointers = {name for name, value in whole.items() if is_pointer(value)}
    found = {name: rule for name, rule in with_pointers(rules, pointers).items() if rule}
    proposal = f". If that is right for it, declare its rule before prepare(): `{declaration(found)}`" if found else ""
    return [_COUNTED.format(name=", ".join(rules)) + proposal]


def _rule_of(whole: Tensor, before: Tensor, one: Tensor, other: Tensor, by: Sequence[float]) -> str:
    """By which rule a buffer changed, by what it changed by in two parts: "" for none, "mean" for what needs none."""
    is_float = whole.is_floating_point()
    if torch.equal(whole, one) and torch.equal(whole, other):
        return "mean"
    if is_float and _is_close(whole, before + by[0] * (one - before) + by[1] * (other - before)):
        return "mean"
    if whole.dtype is torch.bool:
        return "any" if torch.equal(whole, one | other) else ""
    if whole.is_complex():
        return ""
    if torch.equal(whole, torch.maximum(one, other)):
        return "max"
    if torch.equal(whole, torch.minimum(one, other)):
        return "min"
    if _fills(whole, before, one, other):
        return "concat"
    return "sum" if _is_close(whole, one + other - before) else ""


def _fills(whole: Tensor, before: Tensor, one: Tensor, other: Tensor) -> bool:
    """Whether the parts fill slots of a buffer from the same one on, and the whole as many as both together."""
    if not whole.dim():
        return False
    filled = [filled_slots(part, before) for part in (whole, one, other)]
    sizes = [len(each) for each in filled]
    begins = [int(each[0]) if len(each) else -1 for each in filled]
    return 0 < sizes[1] < sizes[0] == sizes[1] + sizes[2] and len(set(begins)) == 1


def uses_changed(model: nn.Module, compute: Compute, rows: slice) -> list[str]:
    """Look whether the outputs depend on what the model has changed in a buffer in the same call, for its own rows."""
    ruled = [
        (name, module, key)
        for name, module, key in registered_buffers(model)
        if (rule := known_rule(module, key)) and rule.is_of_batch and module._buffers[key] is not None
    ]
    if not ruled:
        return []
    try:
        with ChangedBuffers([(module, key) for _, module, key in ruled]) as changed:
            outputs = compute(rows, 0)
    except Exception:  # of a model that does not take so few rows, or operations that cannot be watched
        return []
    if not changed.reached(outputs):
        return []
    return [_USED.format(name=", ".join(name for name, _, _ in ruled))]


def of_batch_statistics(model: nn.Module, compute: Compute, rows: slice) -> str:
    """Say by how much outputs of ``rows`` differ from those of their halves by BatchNorm, which is expected.

    Empty if they do not, or that cannot be told.
    """
    if not uses_batch_statistics(model):
        return ""
    half = (rows.start + rows.stop) // 2
    try:
        with silenced(module for module in model.modules() if draws(module)):
            whole, again = compute(rows, 0), compute(rows, 1)
            parts = [compute(slice(rows.start, half), 0), compute(slice(half, rows.stop), 0)]
    except Exception:  # of a model that does not take so few rows
        return ""
    for output, other, one, rest in zip(whole, again, *parts, strict=True):
        if output.dim() and output.is_floating_point() and _is_close(output, other):
            joined = torch.cat([one, rest])
            if joined.shape == output.shape and not _is_close(output, joined):
                size, most = (float(each.detach().abs().max()) for each in (output - joined, output))
                return BATCH_STATISTICS.format(
                    size=f"outputs of up to {most:.2g} that differ by {size:.2g} at once and in two parts"
                )
    return ""


IN_FULL = "so each worker computes the model in full, which is right and takes as long as on one worker"
_ROWS = (
    "what the model computes for a sample depends on the other samples of its batch (a difference of {size:.1e} in "
    f"outputs of up to {{most:.1e}}), {IN_FULL}. If the first dimension of its inputs is not that of the batch, put "
    "it first (batch_first=True in layers of PyTorch); if samples are compared with each other in the model, do that "
    "in the body of the loop"
)
_SINGLE = (
    "a single value that the model returns for a batch, such as its loss, is not what those of its parts combine to (a "
    f"difference of {{size:.1e}} in {{most:.1e}}), {IN_FULL}. Return what has a row for each sample, and compute the "
    "value in the body of the loop"
)
_KEPT = (
    "the model changes its attribute {name} when it is called, where each worker would find what is of a part of the "
    f"batch, {IN_FULL}. Return from forward() what it computes, and count in the body of the loop"
)
_COUNTED = (
    "the model changes its buffer {name} by the rows that it is given, which the parts of a batch cannot do for all of "
    f"it, {IN_FULL}"
)
FAILS = f"the model cannot be called with a part of a batch ({{kind}}: {{error}}), {IN_FULL}"
HOOKED = (
    f"the layer {{name}} of the model has a hook, which would be called for each part of a batch, {IN_FULL}. Remove "
    "hooks that training does not need"
)
OTHER_SHAPES = (
    f"an output of the model has the shape {{one}} for one part of a batch and {{other}} for another, {IN_FULL}. Pad "
    "all samples of a batch to one length before the model is called"
)
_USED = (
    "what the model computes depends on its buffer {name} after the call has changed it by the rows that it is given, "
    f"where it would be that of the whole batch, {IN_FULL}. Compute with the buffer first, and change it afterwards"
)
CHANGES_INPUTS = (
    f"the model changes its inputs in place, which belong to the body of the loop, {IN_FULL}. Let it change a copy, "
    "as in `x = x - 0.5` instead of `x -= 0.5`"
)
CHANGES_PARAMETERS = (
    "the model changes its parameters in place when it is called, where each worker would change them by its own rows "
    f"alone, {IN_FULL}. nn.Embedding does so with max_norm: without it, the model is divided"
)
OTHER_PARAMETERS = (
    "the model is called with other parameters than its own, as by torch.func.functional_call, and each worker "
    "computes such calls in full, which is right and takes as long as on one worker"
)
NO_ROWS = (
    f"the model is called without a tensor that has a row for each sample, {IN_FULL}. Tensors are found in tuples, "
    "lists and dicts"
)
LIST_OF_SAMPLES = f"the model is called with a list of samples, which cannot be cut by rows, {IN_FULL}"
UNCERTAIN = (
    "it is not certain how a single value that the model returns for a batch, such as its loss, follows from those of "
    f"its parts, {IN_FULL}. Return what has a row for each sample, and compute the value in the body of the loop; or "
    "compute it as a mean, as cross_entropy, or as a sum divided by the sum of a mask of floats"
)


def kept(model: nn.Module, compute: Compute, rows: slice) -> list[str]:
    """Look whether the model changes attributes whenever it is called; they are then what they were before.

    What it keeps from its first call on, such as a table of positions, is none of the samples.
    """
    half = slice(rows.start, (rows.start + rows.stop) // 2)
    saved = save_attributes(model)
    try:
        compute(rows, 0)
        before = marked_attributes(model)
        compute(half, 0)
        after = marked_attributes(model)
    finally:
        restore_attributes(saved)
    changed = sorted(name for name, value in after.items() if value != before.get(name))
    return [_KEPT.format(name=changed[0])] if changed else []


def _combined(whole: Tensor, parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """What the values of the parts combine to; that of the whole where that is not certain."""
    counted = shares([terms_of(part) for part in parts], parts, [weight(cut, shard) for shard in range(2)])
    return whole if counted is None else combined(parts, counted)


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs are equal but for rounding; NaN is equal to itself."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    scale = float(one.detach().abs().nan_to_num().max()) if one.numel() else 0.0
    return torch.allclose(one.double(), other.double(), rtol=0, atol=tolerance * scale, equal_nan=True)
