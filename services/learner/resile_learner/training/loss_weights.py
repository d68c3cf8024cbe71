"""How much the loss of a shard counts in the mean over all shards: by its samples, or by weights of its own."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from resile_shared.errors import UsageError

from .terms import MEAN, MEAN_REDUCTION, NEAR, NLL, SCALED_SUM, SUM, UNKNOWN, WEIGHTED_MEAN, Term, is_close, terms_of


class LossWeight(NamedTuple):
    """How much a shard counts."""

    value: float | None
    """None: by its samples."""
    warning: str = ""
    """What the user should know of losses like this one; empty if it was said, or there is nothing."""


BY_SAMPLES = LossWeight(None)


class LossWeights:
    """Looks at the losses of the shards that this worker computes in a run.

    Of losses that end with the same operations no more is looked at than is needed.
    """

    def __init__(self) -> None:
        self._by_samples: set[tuple[str, ...]] = set()
        """The last operations of losses that were found to count by their samples."""
        self._by_targets: set[tuple[str, ...]] = set()
        """The last operations of losses that were found to count by the weights of their targets."""
        self._is_new = True
        self._is_ambiguous = False

    def of(self, loss: Tensor, *, num_samples: int) -> LossWeight:
        """Return what the graph of ``loss`` shows, that of a shard with ``num_samples``, or what `weigh` was given."""
        if _given:
            self._is_new = False
            return LossWeight(_given.pop())
        node: Any = loss.grad_fn
        last = () if node is None else _last_operations(node)
        if last in self._by_samples:
            return BY_SAMPLES
        if last in self._by_targets:
            return LossWeight(float(node._saved_total_weight))
        weight = self._looked_up(loss, num_samples)
        if last and weight.value is None:
            self._by_samples.add(last)
        elif last and node.name() == NLL:
            self._by_targets.add(last)
        return weight

    def _looked_up(self, loss: Tensor, num_samples: int) -> LossWeight:
        found = terms_of(loss, most=NEAR)
        is_new, self._is_new = self._is_new, False
        warning = "" if not is_new or all(_is_mean(term, num_samples) for term in found) else NO_MEAN
        terms = [term for term in found if term.kind in (MEAN, WEIGHTED_MEAN)]
        weights = [term.weight for term in terms if term.kind == WEIGHTED_MEAN]
        if weights and len(weights) == len(terms) and is_close(weights, weights[:1] * len(weights)):
            return LossWeight(weights[0], warning)
        if any(weight % num_samples for weight in weights) and not self._is_ambiguous:
            self._is_ambiguous = True
            warning = AMBIGUOUS_WEIGHTS
        return LossWeight(None, warning)


def _is_mean(term: Term, num_samples: int) -> bool:
    if term.kind == SCALED_SUM:
        return term.weight > 0 and term.weight % num_samples == 0
    return term.kind not in (SUM, UNKNOWN)


_NUM_OPERATIONS = 12


def _last_operations(node: Any) -> tuple[str, ...]:
    """The names of a mean and of what it is a mean of; none for other operations, which do not tell enough."""
    name = node.name()
    reduction = getattr(node, "_saved_reduction", MEAN_REDUCTION if name == "MeanBackward0" else None)
    if reduction != MEAN_REDUCTION:
        return ()
    names = [name]
    while len(names) < _NUM_OPERATIONS and node.next_functions and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
        names.append(node.name())
    return tuple(names)


AMBIGUOUS_WEIGHTS = (
    "the loss adds a mean with weights of its own (classes, ignored targets, a mask) and a mean over samples: the "
    "means of shards are weighted by their samples, so that the first one differs from that of the batch. Let the body "
    "of the loop run once for each batch, by resile.training.prepare(...), or make both means of one kind"
)
NO_MEAN = (
    "the loss does not look like a mean over samples: something in it is summed over them, or is computed from several "
    "ones (a ratio, a root, negatives, a statistic of the batch). The means of shards are averaged, so that it would "
    "differ from that of the batch. Let the body of the loop run once for each batch, by resile.training.prepare(...); "
    "if it is a mean, say so by resile.training.weigh(len(inputs)) before backward()"
)


def weigh(weight: Tensor | float) -> None:
    """Say how much the mean loss of what is computed now counts: the sum of the weights in that mean.

    For a loss that is a mean with weights of its own, as over the tokens that a mask selects, where its graph does not
    show them: ``weigh(mask.sum())``. Call it in the model if that computes the loss, else before ``backward()``. Where
    the whole batch is computed at once, it changes nothing. Raises UsageError for a number below 0.
    """
    value = float(weight.detach() if isinstance(weight, Tensor) else weight)
    if not (value >= 0 and math.isfinite(value)):
        raise UsageError(f"weigh({value:g}): give the sum of the weights in the mean, 0 or more")
    _given[:] = [value]


def has_weight() -> bool:
    """Whether `weigh` was called for what is computed now."""
    return bool(_given)


_given: list[float] = []
"""What `weigh` was given in this shard."""
forget_weight = _given.clear
"""Something else is computed from here on, for which `weigh` was not called."""


def note_weight(outputs: Sequence[Tensor]) -> None:
    """Let `terms_of` know what the model gave `weigh` as it computed ``outputs``."""
    for output in outputs if _given else ():
        if not output.dim():
            output._resile_weight = _given[0]  # type: ignore[attr-defined]
