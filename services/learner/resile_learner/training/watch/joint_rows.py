"""Whether rows of a batch that are computed in two parts make what plain PyTorch makes of them at once."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data.batches import Batch
from ..gradients import Gradients
from ..loss_weights import AMBIGUOUS_WEIGHTS
from ..module_attributes import Saved, marked_attributes, restore_attributes, save_attributes
from ..seeds import DrawDetector
from ..silenced import BATCH_STATISTICS, draws, has_statistics, silenced, uses_batch_statistics

NUM_PASSES = 3
COMPARED_AT = (0, 1, 8)
"""The iterations of a run that compare rows: those of one batch may be alike in what makes a difference."""
_LEAST_ROWS = 4
"""A smaller part may be too small for what the body does."""
_LEAST_NORM = 1e-2
"""Gradients of parameters that have a smaller part of the norm of all may consist of rounding."""
_ROUNDINGS = 32
"""A loss that differs by more of them is named before the gradients, if these differ."""


class _Pass(NamedTuple):
    """What a body has computed of a part, or of all."""

    loss: float
    weight: float
    """How much the loss counts."""
    gradients: Mapping[int, Tensor]
    """By the number of the parameter, multiplied by the weight. The second part has those of both, added."""
    dtypes: frozenset[torch.dtype]
    """Of what the loss was computed from."""
    attributes: Mapping[str, Any]


class JointRows:
    """Compares rows in two parts with the same rows at once, in passes of a loop's body that do not count.

    They are those of a shard, which needs no more memory than any shard, or, if its halves would be too small, of two
    shards. Modules that draw random numbers are silenced. Those with statistics of the batch, whose difference is
    expected, are silenced at first, and then compared in three more passes. ``computing`` is the context of each pass,
    in which ``add`` is called after the backward pass; ``finding`` says what differs.
    """

    def __init__(self, model: nn.Module, *, compares: bool) -> None:
        self._model = model
        self._compares = compares
        self._draws = DrawDetector()
        self._gradients: Gradients
        self._passes: list[_Pass] = []
        self._differences: list[_Difference | None] = []
        """What differs, without statistics of the batch, and with them."""
        self._warning = ""
        """What the graph of the loss shows."""
        self.num_samples = 0
        """The number of samples of the current pass."""
        self._saved: Saved = {}
        self._expected = ""
        """What was found of statistics of the batch, which keeps nothing else from being found."""
        self._has_drawn = self._has_found = False

    def passes(self, number: int, batch: Batch, gradients: Gradients) -> Iterator[slice]:
        """The rows of each pass in iteration ``number``. A body that draws random numbers cannot be compared."""
        rows = self._rows(COMPARED_AT.index(number), batch) if number in COMPARED_AT else None
        if rows is None or not self._compares or self._has_found or self._has_drawn:
            return
        self._gradients = gradients
        for _ in range(2 if not number and uses_batch_statistics(self._model) else 1):
            for part in (slice(rows[0], rows[1]), slice(rows[1], rows[2]), slice(rows[0], rows[2])):
                if not self._has_drawn:
                    yield part

    def _rows(self, number: int, batch: Batch) -> tuple[int, int, int] | None:
        """Where two parts begin and end; None if there are none. On a device, two shards might be too large."""
        if batch.num_shards < 2:
            return None
        first = batch.rows(number % batch.num_shards)
        if first.stop - first.start >= 2 * _LEAST_ROWS:
            return first.start, (first.start + first.stop) // 2, first.stop
        if any(parameter.device.type != "cpu" for parameter in self._model.parameters()):
            return None
        first, second = (batch.rows(2 * number % (batch.num_shards - 1) + part) for part in range(2))
        return first.start, first.stop, second.stop

    @property
    def _is_conclusive(self) -> bool:
        """Whether the newest passes tell whether the parts differ from the whole."""
        return len(self._passes) >= NUM_PASSES and not self._has_drawn

    @contextmanager
    def computing(self, num_samples: int) -> Iterator[None]:
        """The body computes the next pass in this context: the second part after the first one, all as the first."""
        self.num_samples = num_samples
        number = len(self._passes)
        is_expected, in_round = number >= NUM_PASSES, number % NUM_PASSES
        modules = [m for m in self._model.modules() if draws(m) or (has_statistics(m) and not is_expected)]
        self._draws.begin()
        before = _torch_generators()
        with silenced(modules):
            if not in_round:
                self._saved = save_attributes(self._model)
            yield
            if in_round:
                restore_attributes(self._saved)
        now = _torch_generators()
        self._has_drawn |= self._draws.detected() or not all(map(torch.equal, before, now))

    def add(self, loss: Tensor, value: float, weight: float, warning: str) -> None:
        """The gradients of a pass were computed from its ``loss``, which is ``value`` and counts ``weight``.

        ``warning`` is what its graph shows, as far as it is new.
        """
        self._warning = self._warning or warning
        gradients: Mapping[int, Tensor] = self._gradients.take()
        in_round = len(self._passes) % NUM_PASSES
        if in_round == 1:  # so that no more than two gradients of each parameter are kept
            gradients = _added(self._passes[-1].gradients, gradients)
            self._passes[-1] = self._passes[-1]._replace(gradients={})
        attributes = marked_attributes(self._model)
        self._passes.append(_Pass(value, weight, gradients, _dtypes(loss), attributes))
        if in_round == NUM_PASSES - 1:
            self._differences.append(_difference(self._passes[-NUM_PASSES:]))
            self._passes[-2:] = [each._replace(gradients={}) for each in self._passes[-2:]]

    def finding(self) -> str:
        """Say what differs; empty if nothing does, or that cannot be told."""
        found = self._finding() if self._is_conclusive else self._warning
        self._passes, self._differences, self._warning = [], [], ""
        self._has_found = self._has_found or bool(found and found != self._expected)
        return found

    def _finding(self) -> str:
        if self._warning == AMBIGUOUS_WEIGHTS:
            return self._warning
        found, expected = (*self._differences, None)[:2]
        if found:
            first, second = self._passes[0].attributes, self._passes[1].attributes
            changed = sorted(name for name, value in second.items() if value != first.get(name))
            return KEPT.format(name=changed[0]) if changed else found.text(self._gradients.names(self._model))
        self._expected = BATCH_STATISTICS.format(size=expected.of_expected()) if expected else ""
        return self._expected


class _Difference(NamedTuple):
    """What differs between two parts by themselves and all at once."""

    apart: float
    joint: float
    """The losses."""
    parameter: int | None
    """Whose gradient differs; None: the loss does."""
    size: float
    """The difference, relative to what is compared."""

    def text(self, names: Sequence[str]) -> str:
        if self.parameter is None:
            return LOSS.format(apart=self.apart, joint=self.joint)
        return GRADIENT.format(name=names[self.parameter], size=self.size)

    def of_expected(self) -> str:
        if self.parameter is None:
            return f"a loss of {self.joint:.6g} at once, and of {self.apart:.6g} in two parts"
        return f"one loss at once and in two parts, and gradients that differ by {self.size:.2g} of their size"


def _difference(passes: Sequence[_Pass]) -> _Difference | None:
    """Compare the three passes of a round."""
    parts, joint = passes[:2], passes[2]
    total = sum(each.weight for each in parts)
    apart = sum(each.weight * each.loss for each in parts if each.weight) / total if total else math.nan
    if not (math.isfinite(apart) and math.isfinite(joint.loss) and joint.weight):
        return None
    rounding = max(torch.finfo(dtype).eps for each in passes for dtype in each.dtypes)
    tolerance, scale = rounding**0.5, max(abs(each.loss) for each in passes if each.weight)
    differing = _differing_gradients(parts, joint, total=total, tolerance=10 * tolerance)
    if abs(apart - joint.loss) > scale * (_ROUNDINGS * rounding if differing else tolerance):
        return _Difference(apart, joint.loss, None, 0.0)
    if not differing:
        return None
    parameter = max(differing, key=differing.__getitem__)
    return _Difference(apart, joint.loss, parameter, differing[parameter])


def _differing_gradients(
    parts: Sequence[_Pass], joint: _Pass, *, total: float, tolerance: float
) -> Mapping[int, float]:
    """Return by how much the gradient of a parameter differs, relative to its norm, where it does."""
    apart, of_joint = parts[1].gradients, joint.gradients
    norms = {number: float(torch.linalg.vector_norm(_dense(each))) / joint.weight for number, each in of_joint.items()}
    of_all = math.sqrt(sum(norm**2 for norm in norms.values()))
    if not (of_all and math.isfinite(of_all)):
        return {}
    found, none = {}, torch.zeros(())
    for number in apart.keys() | of_joint.keys():
        one, other = (_dense(each.get(number, none)).double() for each in (apart, of_joint))
        difference = float((one / total - other / joint.weight).norm())
        size = difference / max(norms.get(number, 0.0), _LEAST_NORM * of_all)
        if size > tolerance:
            found[number] = size
    return found


def _added(one: Mapping[int, Tensor], other: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
    return {**one, **{number: one[number] + each if number in one else each for number, each in other.items()}}


def _dense(gradient: Tensor) -> Tensor:
    return (gradient if gradient.layout == torch.strided else gradient.to_dense()).detach()


def _dtypes(loss: Tensor) -> frozenset[torch.dtype]:
    """The dtypes of the floating-point values in the graph of ``loss``."""
    found, seen, waiting = {loss.dtype}, set(), [loss.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found |= {each.dtype for each in getattr(node, "_input_metadata", ()) if each.dtype.is_floating_point}
        waiting += [operand for operand, _ in node.next_functions]
    return frozenset(dtype for dtype in found if dtype.is_floating_point)


def _torch_generators() -> list[Tensor]:
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *on_devices]


_BY_BATCHES = (
    "Let the body of the loop run once for each batch, by resile.training.prepare(...), which computes in full what "
    "cannot be divided"
)
LOSS = (
    "the loss of a batch is not the mean of the losses of its shards: it is {joint:.6g} for some rows at once, and "
    "{apart:.6g} in two parts. Something in the model or in the loss is computed from several samples of the batch (a "
    f"statistic, negatives, the length of the longest text). {_BY_BATCHES}"
)
GRADIENT = (
    "the gradient of a batch is not the mean of the gradients of its shards, although its loss is: that of {name} "
    "differs by {size:.2g} of its size between some rows at once and in two parts. A hook that changes gradients sees "
    f"those of one shard at a time, and so does a detached factor of the loss. {_BY_BATCHES}"
)
KEPT = (
    "the model changes its attribute {name} whenever it is called, and computes with it: it is called once for each "
    f"shard, and in plain PyTorch once for each batch. {_BY_BATCHES}; or count in the body, once an iteration"
)
