"""What a worker has computed of its shards of an iteration, beside gradients and buffers, and how much each counts."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from resile_shared.errors import UsageError

from ..collectives.tree import Interval
from .data.batches import Batch
from .metric_names import find_partial_metric
from .terms import LossWeight, loss_weight

SHARD_SQUARES = "resile/shard squares"
"""The name, among the scalars of a shard, of the squared norm of its gradient."""
_WEIGHT, _NUM_WEIGHTED = "resile/weight", "resile/weighted"
"""The names of what a shard counts in the mean over all, and of whether that is not its number of samples."""
Values = Mapping[str, Tensor | float]


class _Leaf(NamedTuple):
    values: Values
    weight: LossWeight


class Leaves:
    """The shards ``held`` of ``batch``, one after the other, as they are computed."""

    def __init__(self, batch: Batch, held: Interval, *, weighs_by_samples: bool) -> None:
        self._batch = batch
        self._held = held
        self._has_own_weights = not weighs_by_samples and batch.num_shards > 1  # a single one counts as a whole
        self._leaves: list[_Leaf] = []

    def __len__(self) -> int:
        return len(self._leaves)

    def check(self, leaf: int, values: Values) -> None:
        """Raise UsageError if the first shard was given other metrics than ``values``, those of ``leaf``."""
        if not self._leaves:
            return
        earlier = Interval(self._held.lo, leaf), self._leaves[0].values
        if partial_metric := find_partial_metric([earlier, (Interval(leaf, leaf + 1), values)]):
            raise UsageError(partial_metric)

    def weight(self, leaf: int, loss: Tensor, *, is_first: bool) -> LossWeight:
        """How much a shard with this ``loss`` counts, by what its graph shows, or by its samples.

        ``is_first``: it is the first of the run.
        """
        weight = loss_weight(loss, num_samples=len(self._batch.shard(leaf)), is_first=is_first)
        return weight if self._has_own_weights else LossWeight(None)

    def share(self, leaf: int, weight: LossWeight) -> float:
        """By what the loss of a shard is multiplied: what it counts, for each sample of the batch."""
        return self._counted(leaf, weight) / len(self._batch.indices)

    def add(self, values: Values, weight: LossWeight) -> None:
        """Add the next shard: means over it, the loss among them."""
        detached = {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}
        self._leaves.append(_Leaf(detached, weight))

    def sums(self, leaf: int) -> dict[str, float]:
        """What a shard adds to the means over the batch."""
        values, weight = self._leaves[leaf - self._held.lo]
        by_samples, share = self._batch.weight(leaf), self.share(leaf, weight)
        sums = {name: float(value) * by_samples for name, value in values.items()}
        sums["loss"] = float(values["loss"]) * share if share else 0.0  # it may be NaN where nothing counts
        return {**sums, _WEIGHT: self._counted(leaf, weight), _NUM_WEIGHTED: weight.value is not None}

    def square(self, leaf: int, square: float) -> float:
        """What a shard adds to the mean of squared norms, by the ``square`` of its weighted gradient."""
        share = self.share(leaf, self._leaves[leaf - self._held.lo].weight)
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

    def _counted(self, leaf: int, weight: LossWeight) -> float:
        return float(len(self._batch.shard(leaf))) if weight.value is None else weight.value
