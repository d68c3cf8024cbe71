"""What a worker has computed of its shards of an iteration, beside gradients and buffers, and how much each counts."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from resile_shared.errors import UsageError

from ..collectives.tree import Interval
from .data.batches import Batch
from .loss_weights import BY_SAMPLES, LossWeight, LossWeights
from .metric_names import find_partial_metric

SHARD_SQUARES = "resile/shard squares"
"""The name, among the scalars of a shard, of the squared norm of its gradient."""
_WEIGHT, _NUM_WEIGHTED = "resile/weight", "resile/weighted"
"""The names of what a shard counts in the mean over all, and of whether that is not its number of samples."""
Values = Mapping[str, Tensor | float]


class Leaf(NamedTuple):
    """One shard."""

    values: Values
    """Means over it, the loss among them."""
    weight: float
    """How much loss and gradients count."""
    share: float
    """The same for each sample of the batch."""
    has_own_weight: bool
    """Whether the weight is not the number of samples."""


class Leaves:
    """The shards ``held`` of ``batch``, one after the other, as they are computed.

    ``weights`` looks at their losses; None: they count by their samples.
    """

    def __init__(self, batch: Batch, held: Interval, weights: LossWeights | None) -> None:
        self.computed: list[Leaf] = []
        self._batch = batch
        self._held = held
        self._weights = weights if batch.num_shards > 1 else None  # a single one counts as a whole

    def weight_of(self, loss: Tensor, *, num_samples: int) -> LossWeight:
        """Return how much a ``loss`` of so many samples counts."""
        return self._weights.of(loss, num_samples=num_samples) if self._weights else BY_SAMPLES

    def weighed(self, loss: Tensor, values: Values, *, num_samples: int) -> tuple[Leaf, str]:
        """Return a shard with this ``loss``, to be added once its gradients are computed, and what to warn of."""
        found = self.weight_of(loss, num_samples=num_samples)
        weight = float(num_samples) if found.value is None else found.value
        share = weight / len(self._batch.indices)
        return Leaf(values, weight, share, has_own_weight=found.value is not None), found.warning

    def add(self, leaf: Leaf) -> None:
        """Add the next shard. Raises UsageError if it has other metrics than the first one."""
        if self.computed and leaf.values.keys() != self.computed[0].values.keys():
            first = self._held.lo
            number = first + len(self.computed)
            given = [(Interval(first, number), self.computed[0].values), (Interval(number, number + 1), leaf.values)]
            raise UsageError(find_partial_metric(given))
        detached = {name: each.detach() if isinstance(each, Tensor) else each for name, each in leaf.values.items()}
        self.computed.append(leaf._replace(values=detached))

    def sums(self, leaf: int) -> dict[str, float]:
        """What a shard adds to the means over the batch."""
        values, weight, share, has_own_weight = self.computed[leaf - self._held.lo]
        by_samples = self._batch.weight(leaf)
        sums = {name: float(value) * by_samples for name, value in values.items()}
        sums["loss"] = float(values["loss"]) * share if share else 0.0  # it may be NaN where nothing counts
        sums[_WEIGHT], sums[_NUM_WEIGHTED] = weight, has_own_weight
        return sums

    def square(self, leaf: int, square: float) -> float:
        """What a shard adds to the mean of squared norms, by the ``square`` of its weighted gradient."""
        share = self.computed[leaf - self._held.lo].share
        return square / share**2 * self._batch.weight(leaf) if share else 0.0

    def scale(self, sums: dict[str, float]) -> float:
        """Take from the ``sums`` over all shards the factor that makes means of loss and gradients. Raises UsageError.

        It is 1 where shards count by their samples.
        """
        weight, num_weighted, num_samples = sums.pop(_WEIGHT), sums.pop(_NUM_WEIGHTED), len(self._batch.indices)
        if num_weighted not in (0, self._batch.num_shards):
            raise UsageError(
                f"{num_weighted:g} of {self._batch.num_shards} shards have a loss with weights of its own, such as "
                "those of classes, and the others have not: compute the loss in the same way in all shards, or call "
                "resile.training.weigh(...) in each"
            )
        if weight == num_samples:
            return 1.0
        return num_samples / weight if weight else math.nan
